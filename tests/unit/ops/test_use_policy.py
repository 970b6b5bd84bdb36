# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which policy holds: ambient or given, nested, by thread, task, decorator and file."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import ExecutionPolicy, KernelPolicy, Policy, PolicyError, UnsupportedOperationError, ops, use_policy
from xpuruntime.ops import call_context, current_policy

F32 = np.float32
A = np.ones((4, 4), F32)
REFERENCE, BLAS = KernelPolicy(matmul="cpu.reference"), KernelPolicy(matmul="cpu.blas")


def ran() -> str:
    """Run one operation, and say by which kernel."""
    xrt.clear_decisions()
    ops.matmul(A, A)
    (decision,) = xrt.decisions()
    return decision.chosen


def test_blocks_nest_and_do_not_inherit() -> None:
    outer = Policy(kernels=KernelPolicy(matmul="cpu.reference", conv="cpu.reference"), mode="strict")
    with use_policy(outer) as policy:
        assert policy is outer
        assert ran() == "cpu.reference"
        with use_policy(BLAS) as inner:
            assert current_policy() is inner
            assert inner == Policy(kernels=BLAS)
            assert ran() == "cpu.blas"
            assert inner.mode == "prefer"
        assert ran() == "cpu.reference"
        with use_policy(None):
            assert ran() == "cpu.blas"
        assert current_policy() is outer
    assert current_policy() == Policy()


def test_errors_leave_the_block() -> None:
    with pytest.raises(KeyError), use_policy(REFERENCE):
        raise KeyError
    with use_policy(BLAS), pytest.raises(ZeroDivisionError), use_policy(REFERENCE):
        1 / 0  # noqa: B018
    assert current_policy() == Policy()
    assert ran() == "cpu.blas"


def test_one_value_may_be_entered_again() -> None:
    held = use_policy(REFERENCE)
    assert "cpu.reference" in repr(held)
    with held, held:
        with use_policy(None), held:
            assert ran() == "cpu.reference"
        assert ran() == "cpu.reference"
    assert current_policy() == Policy()


def test_a_policy_of_the_call_is_stronger() -> None:
    with use_policy(BLAS):
        ops.matmul(A, A, policy=REFERENCE)
        assert xrt.decisions()[-1].chosen == "cpu.reference"
        ops.matmul(A, A, kernel="cpu.reference")
        assert xrt.decisions()[-1].asked_by == "kernel="
        assert ran() == "cpu.blas"


FORMS: dict[str, Callable[[Path], Any]] = {
    "KernelPolicy": lambda folder: REFERENCE,
    "Policy": lambda folder: Policy(kernels=REFERENCE),
    "dict": lambda folder: {"kernels": {"matmul": "cpu.reference"}},
    "text": lambda folder: str(folder / "policy.yaml"),
    "path": lambda folder: folder / "policy.yaml",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_policy(form: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("schema: xpuruntime.policy/1\nkernels: {matmul: cpu.reference}\n")
    given = FORMS[form](tmp_path)
    with use_policy(given):
        assert ran() == "cpu.reference"
    xrt.clear_decisions()
    ops.matmul(A, A, policy=given)
    assert xrt.decisions()[-1].chosen == "cpu.reference"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "got the number 3. Fix: give a Policy, a path, a mapping or 'auto'"),
        ("strict", r"'strict' is a mode, not a file. Fix: write Policy\(mode='strict'\)"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read"),
        ({"kernelz": {}}, "unknown key 'kernelz'.*did you mean 'kernels'"),
        ({"kernels": {"matmul": "cpuu"}}, "'cpuu' is not a known kernel for matmul; did you mean 'cpu'"),
        (ExecutionPolicy(), r"write Policy\(execution=\.\.\.\)"),
        (KernelPolicy, "got a _PolicyMeta. Fix: give a Policy"),
    ],
    ids=str,
)
def test_wrong_policies(given: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        use_policy(given)
    with pytest.raises(PolicyError, match=said):
        ops.matmul(A, A, policy=given)
    assert current_policy() == Policy()


def test_strict_refuses_and_prefer_says_what_it_did() -> None:
    wrong = KernelPolicy(matmul="cublas")
    with use_policy(wrong):
        assert ran() == "cpu.blas"
        (decision,) = xrt.decisions()
        assert (decision.source, decision.asked, decision.asked_by) == ("fallback", ("cublas",), "kernels.matmul")
        assert len(decision.notes) == 1
        assert "kernels.matmul asks for cublas" in decision.notes[0]
        assert "cpu.blas serves instead" in decision.notes[0]
    with (
        use_policy(Policy(kernels=wrong, mode="strict")),
        pytest.raises(
            UnsupportedOperationError,
            match=r"cublas(\.cublasLt: serves cuda|: the backend cublas is not in this build)",
        ) as caught,
    ):
        ops.matmul(A, A)
    assert "kernels.matmul demands" in str(caught.value)
    candidates = dict(caught.value.candidates)
    assert {"cpu.blas", "cpu.reference"} <= candidates.keys()
    assert all(f"\n  {kernel}: {reason}\n" in str(caught.value) for kernel, reason in candidates.items())


def test_rules_by_size_dtype_and_phase() -> None:
    rules = [
        {"match": {"op": "matmul", "m": "<=2"}, "use": "cpu.reference"},
        {"match": {"dtype": "fp64", "phase": ["train", "backward"]}, "use": "cpu.reference"},
    ]
    x = np.ones((2, 4), F32)
    with use_policy({"kernels": {"matmul": "cpu.blas", "rules": rules}}):
        for call, chosen, source, asked_by in (
            (lambda: ops.matmul(x, A), "cpu.reference", "rule", "kernels.rules[0]"),
            (lambda: ops.matmul(A, A), "cpu.blas", "pinned", "kernels.matmul"),
            (lambda: ops.matmul(A, A.astype(F32), phase="train"), "cpu.blas", "pinned", "kernels.matmul"),
            (lambda: ops.matmul(*(A.astype(float),) * 2), "cpu.blas", "pinned", "kernels.matmul"),
            (lambda: ops.matmul(*(A.astype(float),) * 2, phase="train"), "cpu.reference", "rule", "kernels.rules[1]"),
        ):
            call()
            last = xrt.decisions()[-1]
            assert (last.chosen, last.source, last.asked_by) == (chosen, source, asked_by), last.text
        assert last.phase == "train"


def test_determinism_and_tf32_come_from_the_policy() -> None:
    x = np.ones((3, 8), F32)
    both = Policy(execution=ExecutionPolicy(determinism="run_to_run", tf32=True))
    with use_policy(both):
        ops.matmul(A, A)
        assert "deterministic" in xrt.decisions()[-1].description
        assert xrt.decisions()[-1].dtype == "tf32"
        ops.layer_norm(x)
        assert "deterministic" in xrt.decisions()[-1].description
        ops.matmul(A.astype(float), A.astype(float))
        assert xrt.decisions()[-1].dtype == "fp64"
    ops.matmul(A[:2], A)
    assert "deterministic" not in xrt.decisions()[-1].description


def test_sixteen_threads_with_policies_of_their_own() -> None:
    start = threading.Barrier(16)
    seen: dict[int, set[str]] = {}

    def work(number: int) -> None:
        kernel = ("cpu.reference", "cpu.blas")[number % 2]
        start.wait()
        with use_policy(KernelPolicy(matmul=kernel)):
            chosen = set()
            for _ in range(200):
                ops.matmul(A, A)
                chosen.add(str(current_policy().kernels.preferences["matmul"]))
        seen[number] = chosen

    with use_policy(KernelPolicy(matmul="cublas")):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {number: {("cpu.reference", "cpu.blas")[number % 2]} for number in range(16)}
    counts = dict.fromkeys(("cpu.reference", "cpu.blas"), 0)
    for decision in xrt.decisions():  # more than two: results lie at addresses of other alignments
        if decision.asked_by == "kernels.matmul":
            counts[decision.chosen] += decision.count
    assert counts == {"cpu.reference": 1600, "cpu.blas": 1600}
    assert len(xrt.decisions()) <= 2 * 5, "all threads share the choices of a policy"


def test_tasks_have_their_own() -> None:
    async def work(kernel: str, turns: int) -> list[str]:
        seen = []
        with use_policy(KernelPolicy(matmul=kernel)):
            for _ in range(turns):
                await asyncio.sleep(0)
                ops.matmul(A, A)
                seen.append(str(current_policy().kernels.preferences["matmul"]))
        assert "conv" in current_policy().kernels.preferences, "that of the task that started it"
        return seen

    async def main() -> None:
        with use_policy(KernelPolicy(conv="cpu")):
            both = await asyncio.gather(work("cpu.reference", 5), work("cpu.blas", 9))
        assert both == [["cpu.reference"] * 5, ["cpu.blas"] * 9]
        assert current_policy() == Policy()

    asyncio.run(main())


def test_it_decorates_functions() -> None:
    @use_policy(REFERENCE)
    def plain(x: int, *, y: int = 2) -> tuple[int, str]:
        """Have a docstring."""
        return x + y, ran()

    assert plain(1, y=3) == (4, "cpu.reference")
    assert (plain.__name__, plain.__doc__) == ("plain", "Have a docstring.")
    assert ran() == "cpu.blas"

    @use_policy(REFERENCE)
    def recursive(depth: int) -> str:
        return ran() if depth == 0 else recursive(depth - 1)

    assert recursive(3) == "cpu.reference"

    @use_policy(REFERENCE)
    def failing() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert current_policy() == Policy()


def test_it_decorates_coroutines() -> None:
    @use_policy(REFERENCE)
    async def work() -> str:
        await asyncio.sleep(0)
        return ran()

    async def main() -> None:
        task = work()
        assert ran() == "cpu.blas"
        assert await task == "cpu.reference"
        assert ran() == "cpu.blas"

    asyncio.run(main())


def test_it_does_not_decorate_what_yields() -> None:
    def plain() -> Iterator[int]:
        yield 1

    async def asynchronous() -> Any:
        yield 1

    for function in (plain, asynchronous):
        with pytest.raises(xrt.InputError, match="which yields: the policy would hold for its caller too"):
            use_policy(REFERENCE)(function)


def test_in_generators_it_ends_with_the_block() -> None:
    def numbers(kernels: KernelPolicy) -> Iterator[str]:
        with use_policy(kernels):
            yield ran()

    assert list(numbers(REFERENCE)) == ["cpu.reference"]
    assert current_policy() == Policy()
    first, second = numbers(REFERENCE), numbers(BLAS)
    assert (next(first), next(second)) == ("cpu.reference", "cpu.blas")
    first.close()  # not in the order in which they were entered
    second.close()
    assert current_policy() == Policy()


def test_leaving_in_another_context_is_told() -> None:
    held = use_policy(REFERENCE)
    contextvars.copy_context().run(held.__enter__)
    with pytest.raises(RuntimeError, match="left in another context"):
        held.__exit__()


def test_many_policies_are_forgotten_and_made_again() -> None:
    for number in range(300):
        with use_policy({"kernels": {"rules": [{"match": {"m": number + 10}, "use": "cpu.reference"}]}}):
            ops.matmul(A, A)
    assert len(call_context._contexts) <= call_context._MOST
    for number in range(300):
        ops.matmul(A, A, kernel=["cpu.reference", f"other.k{number}"])
    with use_policy(REFERENCE):
        assert ran() == "cpu.reference"
    assert ran() == "cpu.blas"
