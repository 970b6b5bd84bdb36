# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fast kernels of products on each route: the same results, and Python only where it is required."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_products import ELSEWHERE, FORMS, call, count_asked  # noqa: E402
from many_threads import at_work  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.errors import UnsupportedOperationError  # noqa: E402
from xpuruntime.pytorch.call_scope import module_paths  # noqa: E402
from xpuruntime.pytorch.dispatch import context  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import fast_kernels, matmul, registry  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_is_watched_afterwards", "decisions_of_this_test", "route"),
]


@pytest.fixture
def asked(monkeypatch):
    return count_asked(monkeypatch)


def same(found, expected):
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride(), found.device) == (expected.dtype, expected.stride(), expected.device)
    assert (found.requires_grad, found.is_conj(), found.is_neg()) == (False, False, False)


@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded", "empty", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_known_to_be_native_is_pytorchs_own_to_the_bit(form, dtype, layout):
    run = call(form, dtype, layout)
    expected = run().clone(memory_format=torch.preserve_format)
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(4):
            same(run(), expected)


@pytest.mark.parametrize("form", FORMS)
def test_python_is_asked_once_in_each_thread_at_most(form, asked):
    run = call(form)
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(5):
            run()
        assert len(asked) == 1
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(asked) == 1  # the route was known


@pytest.mark.parametrize("form", FORMS)
def test_another_policy_is_obeyed_at_once(form):
    run = call(form)
    for kernel in ("cpu.reference", "cpu.blas"):
        with xt.kernel_policy(rules=ELSEWHERE):
            run(), run(), run()
            assert len(xrt.decisions()) == 0
            with xt.kernel_policy(matmul=kernel):
                run(), run(), run()
                assert {decision.kernel for decision in xrt.decisions()} == {kernel}
                assert sum(decision.count for decision in xrt.decisions()) == 3
            xrt.clear_decisions()
            run()
            assert len(xrt.decisions()) == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_of_ours_serves_without_python_once_it_is_known(form, asked):
    run = call(form)
    expected = run().clone()
    with xt.kernel_policy(matmul="cpu.reference"):
        for _ in range(4):
            torch.testing.assert_close(run(), expected)
    folded = not form.startswith("baddbmm")  # its addend is a row for each matrix, which the kernel adds as well
    if folded:
        assert len(asked) == 1
    assert sum(decision.count for decision in xrt.decisions()) == 4


def python_frames(run):
    """Return the functions in Python that a call passes, by file and name."""
    frames = []

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call":
            frames.append((Path(code.co_filename).name, code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [one for one in frames if one[0] != Path(__file__).name]


def rule(**match):
    return [{"match": {"op": "matmul", **match}, "use": "cpu.blas"}]


@pytest.mark.parametrize(
    ("rules", "phases"),
    [(ELSEWHERE, set()), (rule(), {"infer"}), (rule(phase="train"), {"train"}), (rule(module="body"), {"infer"})],
    ids=["of others", "of all", "of a phase", "of a module"],
)
def test_a_known_product_passes_no_function_in_python_on_its_way_to_the_kernel(rules, phases):
    a, b = torch.ones(3, 4), torch.ones(4, 5)

    def run():
        torch.mm(a, b)

    with xt.kernel_policy(rules=rules), module_paths.inside("body"):
        run(), run()
        assert python_frames(run) == []
    assert {decision.phase for decision in xrt.decisions()} == phases
    assert sum(decision.count for decision in xrt.decisions() if decision.kernel == "cpu.blas") == (3 if phases else 0)


def test_a_known_product_of_copies_passes_few_functions_on_its_way_to_the_kernel():
    a, b = torch.ones(3, 8)[:, ::2], torch.ones(4, 5)

    def run():
        torch.mm(a, b)

    with xt.kernel_policy(matmul="cpu.blas"):
        run(), run()
        passed = python_frames(run)
    assert 0 < len(passed) <= 5, passed  # then `_core.op_matmul`
    assert len({file for file, _ in passed if file != "<string>"}) <= 3


def test_determinism_that_is_switched_on_between_two_calls_is_obeyed():
    run = call("mm")
    with xt.kernel_policy(matmul="cpu.blas"):
        run(), run()
        torch.use_deterministic_algorithms(True)
        try:
            run(), run()
        finally:
            torch.use_deterministic_algorithms(False)
        run()
    assert sum(decision.count for decision in xrt.decisions()) == 5


def test_a_strict_refusal_comes_through_as_it_is():
    a = torch.randn(3, 4, requires_grad=True)
    policy = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"matmul": "cublas.cublasLt"}}
    with xt.kernel_policy(policy):
        for _ in range(2):
            with pytest.raises(UnsupportedOperationError, match=r"cublas\.cublasLt"):
                torch.mm(a, torch.randn(4, 5))
    product = torch.mm(a, torch.randn(4, 5)).sum()
    with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match=r"cublas\.cublasLt"):
        product.backward()  # in which a thread of autograd's may be what fails


def test_an_interrupt_comes_through_as_it_is(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(matmul, "_run", interrupt)
    with xt.kernel_policy(matmul="cpu.reference"), pytest.raises(KeyboardInterrupt):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def test_tensors_that_look_like_others_but_are_negated_stay_pytorchs():
    plain = torch.randn(3, 3)
    negated = torch.complex(torch.randn(3, 3), torch.randn(3, 3)).conj().imag
    assert negated.is_neg()
    other = negated.clone()  # of the same shape, and strides of its own
    expected = torch.mm(plain, negated), torch.mm(plain, other)
    with xt.kernel_policy(matmul="cpu.reference"):
        for _ in range(3):
            torch.testing.assert_close(torch.mm(plain, negated), expected[0])
            torch.testing.assert_close(torch.mm(plain, other), expected[1])


def test_conjugated_matrices_are_multiplied_as_such():
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(3, 3, dtype=torch.complex64)
    expected = torch.mm(a, b), torch.mm(a.conj(), b), torch.mm(a, b.conj())
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            same(torch.mm(a, b), expected[0])
            same(torch.mm(a.conj(), b), expected[1])
            same(torch.mm(a, b.conj()), expected[2])


def test_addends_with_numbers_are_looked_at_by_themselves():
    c, a, b = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    expected = torch.addmm(c, a, b), torch.addmm(c, a, b, beta=2, alpha=3)
    for policy in ({"rules": ELSEWHERE}, {"matmul": "cpu.reference"}):
        with xt.kernel_policy(**policy):
            for _ in range(3):
                torch.testing.assert_close(torch.addmm(c, a, b), expected[0])
                torch.testing.assert_close(torch.addmm(c, a, b, beta=2, alpha=3), expected[1])


def test_over_another_librarys_override_the_kernel_below_is_called():
    seen = []
    native = torch.library.get_kernel("aten::bmm", "CPU")

    def other(keyset, a, b):
        seen.append(1)
        return native.call_boxed(keyset, a, b)

    registry.quiet_override_warning()
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm", other, "CPU", with_keyset=True, allow_override=True)
    run = call("bmm")
    try:
        with xt.kernel_policy(rules=ELSEWHERE):
            for _ in range(3):
                run()
        assert len(seen) == 3
    finally:
        library._destroy()


def test_an_override_placed_over_ours_is_called_and_can_be_taken_away():
    seen = []
    run = call("mm")
    with xt.kernel_policy(rules=ELSEWHERE):
        run()
        ours = torch.library.get_kernel("aten::mm", "CPU")

        def other(keyset, a, b):
            seen.append(1)
            return ours.call_boxed(keyset, a, b)

        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", other, "CPU", with_keyset=True, allow_override=True)
        try:
            run()
            assert len(seen) == 1
        finally:
            library._destroy()
        run()
        assert len(seen) == 1


def test_where_no_kernel_in_c_can_be_placed_python_kernels_stand_in(monkeypatch):
    monkeypatch.setattr(fast_kernels.FastKernel, "place", lambda self: None)
    run = call("mm")
    expected = run()
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            same(run(), expected)


def test_a_route_that_changes_is_taken_note_of(asked):
    run = call("mm")
    with xt.kernel_policy(rules=ELSEWHERE):
        run(), run()
        assert len(asked) == 1
        now = context.active_policy()
        ((key, _),) = now.routes.items()
        now.keep(key, None)
        run()
        assert len(asked) == 2


def test_results_are_freed():
    a = torch.randn(64, 64)
    with xt.kernel_policy(rules=ELSEWHERE):
        torch.mm(a, a), torch.addmm(a, a, a)
        gc.collect()
        alive = sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects())
        for _ in range(50):
            torch.mm(a, a), torch.addmm(a, a, a), torch.mm(a, a, out=torch.empty(64, 64))
        gc.collect()
        # What other tests left may go meanwhile.
        assert sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects()) <= alive
    assert sys.getrefcount(a) < 10


def test_what_a_policy_has_placed_is_freed_with_it():
    placed = []
    with xt.kernel_policy(rules=ELSEWHERE):
        for form in FORMS:
            call(form)()
        placed = [weakref.ref(one) for group in CONTEXT.placed.values() for one in group]
    with xt.kernel_policy(rules=ELSEWHERE):
        pass  # the last fast kernels stay, for threads that may be inside of them
    gc.collect()
    assert placed
    assert [one().override.name for one in placed if one() is not None] == []


def test_threads_multiply_while_one_policy_follows_another():
    run, other = call("mm"), call("addmm")
    expected = run(), other()

    def work():
        torch.testing.assert_close(run(), expected[0])
        torch.testing.assert_close(other(), expected[1])

    with xt.kernel_policy(rules=ELSEWHERE), at_work(work, 4):
        for _ in range(25):
            with xt.kernel_policy(matmul="cpu.reference"):
                run()
            with xt.kernel_policy(rules=[{**ELSEWHERE[0], "match": {"op": "matmul", "m": 4096, "phase": "train"}}]):
                run()


def test_a_policy_that_follows_another_leaves_what_both_need_in_place(monkeypatch):
    placed = []
    real = registry._Placed.place
    monkeypatch.setattr(registry._Placed, "place", lambda self: (placed.append(self.override.name), real(self))[1])
    with xt.kernel_policy(rules=ELSEWHERE):
        count = len(placed)
        with xt.kernel_policy(matmul="cpu.reference"):
            assert "aten::mm [CPU]" in registry.installed()
        assert len(placed) == count
    assert registry.installed() == ()


def test_outputs_of_operations_are_pytorchs_own_memory():
    # What DLPack hands over cannot be resized in place, as it is nobody's to grow.
    made = xrt.ops.matmul(torch.ones(2, 3), torch.ones(3, 2))
    assert made.untyped_storage().resizable()
    assert made.tolist() == [[3.0, 3.0], [3.0, 3.0]]
