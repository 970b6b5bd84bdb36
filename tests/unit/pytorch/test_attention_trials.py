# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is measured where a tuned policy chooses a kernel of attention: the same work, native or ours."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.measuring.rounds import KernelTiming, replacing  # noqa: E402
from xpuruntime.policies import TuningPolicy  # noqa: E402
from xpuruntime.pytorch import _private_api  # noqa: E402
from xpuruntime.pytorch.attention import selection as attention_selection  # noqa: E402
from xpuruntime.pytorch.attention.call import AttentionCall  # noqa: E402
from xpuruntime.pytorch.dispatch import tuning  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "decisions_of_this_test")]

F = torch.nn.functional


def operands(needs_grad, kv_heads=4):
    torch.manual_seed(0)
    shapes = ((2, 4, 8, 16), (2, kv_heads, 8, 16), (2, kv_heads, 8, 16))
    return tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=needs_grad) for shape in shapes)


@pytest.mark.usefixtures("nothing_is_tuned")
def test_what_serves_training_is_measured_with_its_gradient_on_both_sides(monkeypatch):
    done = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: (done.append(1), real(*args, **more))[1])
    gradients = []

    def measure(candidates, *_):
        for _, run in candidates:
            done.clear()
            run()
            gradients.append(len(done))
        return replacing([KernelTiming(candidates[0][0], "", 1.0)], rounds=0, seconds=3.0)

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)
    q, k, v = operands(True)
    with xt.kernel_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert len(gradients) > 1
    assert set(gradients) == {1}


@pytest.fixture
def unfused_is_fastest(nothing_is_tuned, monkeypatch):
    """PyTorch's unfused attention is a candidate here, which it is not otherwise, and the fastest."""
    monkeypatch.setattr(attention_selection, "others_of_pytorch", lambda _: ["torch.math"])
    real = tuning._measure
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 1.0)

    def measure(candidates, device, eager, costs, rule, *_):
        real(candidates, device, eager, costs, TuningPolicy(budget=0.001), None, {})
        if "torch.math" in dict(candidates):
            assert "torch.math" not in costs  # guards call it, and its gradient goes no way of ours
        timings = [
            KernelTiming(name, "", 1.0, 0.1, 0.1, 0.1, "faster")
            if name == "torch.math"
            else KernelTiming(name, "", 9.0)
            for name, _ in candidates
        ]
        return replacing(timings, rounds=11, seconds=3.0)

    monkeypatch.setattr(tuning, "_measure", measure)


def observed(run):
    """The kernel that was chosen in the forward, and whether it was the unfused one that ran."""
    with xt.explain() as report:
        run()
    (row,) = (row for row in report.rows if row.op == "attention" and row.phase == "train")
    return row.resolved, "math" in " ".join(row.observed)


@pytest.mark.usefixtures("unfused_is_fastest")
def test_another_kernel_of_pytorch_serves_where_it_is_the_fastest():
    q, k, v = operands(True)
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))

    def run():
        grad = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
        torch.testing.assert_close(grad, expected)

    with xt.kernel_policy(xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")):
        run()
        assert observed(run) == ("torch.math", True)
        run()  # guards know it as no bare call of PyTorch's
        assert observed(run) == ("torch.math", True)
        torch.backends.cuda.enable_math_sdp(False)
        try:
            assert observed(run)[1] is False  # what the program has switched off stays so
        finally:
            torch.backends.cuda.enable_math_sdp(True)


def test_the_candidates_are_what_can_serve_is_not_chosen_and_not_switched_off(monkeypatch):
    call = AttentionCall(*operands(True), needs_grad=True)
    assert attention_selection.others_of_pytorch(call) == []  # on the CPU PyTorch chooses flash, and has no other
    real = torch._fused_sdp_choice

    def unfused(*args, **more):  # where it can
        return 0 if torch.backends.cuda.math_sdp_enabled() else real(*args, **more)

    monkeypatch.setattr(_private_api, "sdp_choice", unfused)
    assert attention_selection.others_of_pytorch(call) == ["torch.flash"]
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert attention_selection.others_of_pytorch(call) == []
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nothing_is_measured_inside_of_transforms(monkeypatch):
    def never(*_, **__):
        raise AssertionError("a kernel was measured")

    monkeypatch.setattr(tuning, "pick", never)
    q = torch.randn(3, 1, 2, 4, 8)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    expected = torch.stack([attend(x) for x in q])
    with xt.kernel_policy(xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")):
        torch.testing.assert_close(torch.func.vmap(attend)(q), expected)
        torch.func.vmap(torch.func.grad(lambda x: attend(x).sum()))(q)
        torch.func.jacrev(attend)(q[0])
