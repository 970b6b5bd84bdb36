# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The addon's fast kernels of products, which PyTorch calls as its own."""

from __future__ import annotations

import gc
import sys

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_products import ELSEWHERE, FORMS, call, count_asked  # noqa: E402
from many_threads import at_work  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import matmul  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_is_watched_afterwards", "decisions_of_this_test", "route"),
    pytest.mark.parametrize("route", ["addon"], indirect=True),
]

ADDON = "registered by xpuruntime"


@pytest.fixture
def asked(monkeypatch):
    return count_asked(monkeypatch)


def top(form):
    """Return what PyTorch says of the kernel that an operator has on the CPU."""
    table = torch._C._dispatch_dump_table(f"aten::{form}")
    return next(line for line in table.splitlines() if line.startswith("CPU: "))


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_calls_the_gate_itself_and_its_own_kernel_afterwards(form):
    before = top(form)
    with xt.kernel_policy(rules=ELSEWHERE):
        assert ADDON in top(form)
    assert top(form) == before


@pytest.mark.parametrize("form", FORMS)
def test_calls_with_boxed_values_are_the_same_calls(form, asked):
    run = call(form)
    expected = run().clone()
    packet, _, overload = form.partition(".")
    with xt.kernel_policy(rules=ELSEWHERE):
        kernel = torch.library.get_kernel(f"aten::{form}", "CPU")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        torch.manual_seed(0)
        batch = (2,) if packet in ("bmm", "baddbmm") else ()
        operands = [torch.randn(*batch, 3, 4), torch.randn(*batch, 4, 5)]
        if packet in ("addmm", "baddbmm"):
            operands.insert(0, torch.randn(5))
        more = {"out": torch.empty(*batch, 3, 5)} if overload else {}
        for _ in range(3):
            assert torch.equal(kernel.call_boxed(keys, *operands, **more), expected)
    assert len(asked) == 1


@pytest.mark.parametrize("beta", [2, 0.5, True, 2**40, 1.0])
def test_numbers_arrive_as_they_were_given(beta, monkeypatch):
    seen = []
    real = matmul._run
    monkeypatch.setattr(matmul, "_run", lambda *args: (seen.append(args[-1]), real(*args))[1])
    c, a, b = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    expected = torch.addmm(c, a, b, beta=beta)
    with xt.kernel_policy(rules=ELSEWHERE):
        assert torch.equal(torch.addmm(c, a, b, beta=beta), expected)
    assert [(more["beta"], type(more["beta"])) for more in seen] == [(beta, type(beta))]


def test_complex_numbers_arrive_too():
    c, a, b = (torch.randn(3, 3, dtype=torch.complex64) for _ in range(3))
    expected = torch.addmm(c, a, b, beta=1 + 2j, alpha=-2j)
    with xt.kernel_policy(rules=ELSEWHERE):
        assert torch.equal(torch.addmm(c, a, b, beta=1 + 2j, alpha=-2j), expected)


def test_nothing_leaks_over_many_calls():
    a, c, out = torch.randn(8, 8), torch.randn(8), torch.empty(8, 8)

    def work(times):
        for _ in range(times):
            torch.mm(a, a), torch.addmm(c, a, a), torch.mm(a, a, out=out), torch.addmm(c, a, a, beta=2)

    def blocks():
        gc.collect()
        return sys.getallocatedblocks()

    with xt.kernel_policy(rules=ELSEWHERE):
        work(200)
        before = blocks(), a._use_count(), c._use_count(), out._use_count()
        work(2000)
        after = blocks(), a._use_count(), c._use_count(), out._use_count()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 500
    result = torch.mm(a, a)
    assert result._use_count() == torch.empty(1)._use_count()


def test_sixteen_threads_multiply_while_gates_come_and_go():
    runs = [call(form) for form in FORMS if not form.endswith(".out")]
    expected = [run() for run in runs]

    def work():
        for run, value in zip(runs, expected, strict=True):
            torch.testing.assert_close(run(), value)

    with at_work(work, 16):
        for _ in range(10):
            with xt.kernel_policy(rules=ELSEWHERE):
                for run in runs:
                    run()
                with xt.kernel_policy(matmul="cpu.reference"):
                    runs[0]()
