# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ctrl-C in policies, `explain` and profiles of PyTorch leaves it as it was, and the next block works."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import press, press_before

torch = pytest.importorskip("torch")

from torch.nn.modules import module as torch_module  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime import _core  # noqa: E402
from xpuruntime.pytorch.dispatch import policy_scope  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

# An interruption inside of a destructor is lost: Python writes it to stderr, and pytest warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
RULES = xrt.KernelPolicy(
    matmul="cpu.blas",
    attention="torch.math",
    rules=[{"match": {"module": "a", "op": "matmul"}, "use": "cpu.reference"}],
)
_A = np.arange(12, dtype=np.float32).reshape(3, 4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x))
        return result


def _state() -> dict[str, Any]:
    return {
        "overridden": "xpuruntime" in torch._C._dispatch_dump("aten::mm"),
        "required": {name: users for name, users in CONTEXT.users.items() if users},
        "hooks": (len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks)),
        "running": _core.running_module(),
        "policy": (CONTEXT.process_policy, CONTEXT.thread.policy),
        "own policies": len(CONTEXT.own_policies),
        "observer": CONTEXT.observer,
        "switches": dict(CONTEXT.switch_claims),
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "profiler": (torch.autograd.profiler._is_profiler_enabled, torch._C._autograd._profiler_enabled()),
        "modes": torch._C._len_torch_dispatch_stack(),
        "grad": torch.is_grad_enabled(),
        "tag": torch.compiler.config.cache_key_tag,
        "warnings": [entry for entry in warnings.filters if entry[0] == "ignore" and entry[1] is None],
    }


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = _state()
    yield
    assert _state() == before


def _works(kernel: str = "cpu.blas") -> None:
    with xt.kernel_policy(matmul=kernel), xt.explain() as report:
        answer = torch.from_numpy(_A) @ torch.from_numpy(_A.T)
    np.testing.assert_allclose(answer.numpy(), _A.astype(np.float64) @ _A.T.astype(np.float64))
    assert [row.resolved for row in report.rows if row.op == "matmul"] == [kernel]


@pytest.mark.filterwarnings("ignore:kernels.rules:xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("outside", [False, True], ids=["in a block", "set"])
def test_an_interrupted_forward_names_no_module_later(error: type[BaseException], outside: bool) -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    def paths() -> set[tuple[str, str, str]]:
        with xt.explain() as report:
            Net()(torch.ones(2, 4)).sum().backward()
            torch.mm(torch.ones(2, 4), torch.ones(4, 4))
        return {(row.module, row.phase, row.resolved) for row in report.rows if row.op == "matmul"}

    if outside:
        xt.set_kernel_policy(RULES)
    try:
        with xt.kernel_policy(RULES):
            before = paths()
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), Slow())
        gone = weakref.ref(net)
        around = contextlib.nullcontext() if outside else xt.kernel_policy(RULES)
        with pytest.raises(error), around:
            net(torch.ones(2, 4))
        del net
        gc.collect()
        with xt.kernel_policy(RULES):
            assert paths() == before
        assert gone() is None
    finally:
        xt.clear_kernel_policy()
    assert ("a", "train", "cpu.reference") in before


def test_a_forward_that_catches_an_interruption_goes_on_in_its_own_module() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.a = Inner(), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                self.inner(x)
            except KeyboardInterrupt:
                x = torch.mm(x, torch.ones(4, 4))
            result: torch.Tensor = self.a(x)
            return result

    with xt.kernel_policy(RULES), xt.explain() as report:
        Outer()(torch.ones(2, 4))
    rows = {(row.module, row.resolved) for row in report.rows if row.op == "matmul"}
    assert rows == {("", "cpu.blas"), ("a", "cpu.reference")}


def _kernel() -> str | None:
    policy = xt.get_kernel_policy()
    return None if policy is None else str(policy.matmul)


def test_blocks_left_in_another_order() -> None:
    one, two, three = (xt.kernel_policy(matmul=word) for word in ("cpu.blas", "cpu.reference", "torch"))
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert _kernel() == "cpu.reference"
    three.__enter__()
    two.__exit__(None, None, None)
    assert _kernel() == "torch"
    three.__exit__(None, None, None)
    assert _kernel() is None


def test_tasks_whose_blocks_overlap() -> None:
    async def work(word: str, turns: int) -> None:
        with xt.kernel_policy(matmul=word):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(work("cpu.blas", 1), work("cpu.reference", 5), work("torch", 3))

    asyncio.run(main())
    assert _kernel() is None
    _works()


def test_threads_whose_blocks_overlap() -> None:
    inside, leave = threading.Barrier(2), threading.Event()

    def work() -> None:
        with xt.kernel_policy(matmul="cpu.reference"):
            inside.wait()
            leave.wait()

    thread = threading.Thread(target=work)
    with xt.kernel_policy(matmul="cpu.blas"):
        thread.start()
        inside.wait()
    assert _kernel() == "cpu.reference"
    leave.set()
    thread.join()
    assert _kernel() is None


def test_a_generator_that_is_suspended_in_a_block() -> None:
    def steps() -> Iterator[int]:
        with xt.kernel_policy(matmul="cpu.reference"):
            yield 1
            yield 2

    running = steps()
    next(running)
    with xt.kernel_policy(matmul="cpu.blas"):
        assert _kernel() == "cpu.blas"
        next(running)
    assert _kernel() == "cpu.reference"
    running.close()
    assert _kernel() is None


def test_a_block_that_python_never_leaves() -> None:
    block = xt.kernel_policy(matmul="cpu.reference")
    block.__enter__()
    assert _kernel() == "cpu.reference"
    del block
    assert _kernel() is None
    watched = xt.explain()
    watched.__enter__()
    del watched
    _works()


def test_explain_suspended_in_a_generator_is_the_only_one() -> None:
    def steps() -> Iterator[Any]:
        with xt.explain() as report:
            yield report

    running = steps()
    next(running)
    with pytest.raises(xrt.InputError, match="one runs already"), xt.explain():
        pass
    running.close()
    _works()


@pytest.mark.parametrize("block", [lambda: xt.kernel_policy(RULES), xt.explain, xt.profile])
def test_ctrl_c_in_a_block(block: Any) -> None:
    net, x, before = Net(), torch.ones(2, 4), _state()
    with pytest.raises(KeyboardInterrupt), block():  # noqa: PT012
        net(x).sum().backward()
        press()
    assert _state() == before
    _works()


def test_ctrl_c_while_a_policy_is_set_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _state()
    monkeypatch.setattr(policy_scope, "install_policy", press_before(policy_scope.install_policy))
    with pytest.raises(KeyboardInterrupt):
        xt.set_kernel_policy(matmul="cpu.reference")
    assert _kernel() == "cpu.reference"
    with pytest.raises(KeyboardInterrupt):
        xt.clear_kernel_policy()
    assert _state() == before


def test_ctrl_c_while_a_block_is_entered_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _state()
    with monkeypatch.context() as patch:
        patch.setattr(policy_scope, "install_policy", press_before(policy_scope.install_policy))
        with pytest.raises(KeyboardInterrupt), xt.kernel_policy(matmul="cpu.reference"):
            pass
    gc.collect()
    assert _state() == before
    _works()
