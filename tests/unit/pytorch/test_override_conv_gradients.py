# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gradients of convolutions under a policy: which are computed, by which kernel, and what stays PyTorch's."""

from __future__ import annotations

import itertools

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
F = torch.nn.functional

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

INPUT, WEIGHT = "conv_input_gradient", "conv_weight_gradient"
STRICT = {"schema": "xpuruntime.policy/1", "mode": "strict"}


def served() -> list[tuple[str, str, int]]:
    return [(decision.op, decision.chosen, decision.count) for decision in xrt.decisions()]


def arguments(dtype=torch.float64, bias=True):
    shapes = [(2, 4, 7, 8), (6, 2, 3, 2), (6,)][: 3 if bias else 2]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kernel", ["cpu.reference", "cpu.gemm_conv"])
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 2, "stride": (2, 3), "padding": (1, 2)},
        {"groups": 2, "dilation": (2, 1), "padding": 1},
    ],
    ids=str,
)
def test_finite_differences_once_and_twice(kernel, options):
    wanted = arguments()
    with xt.kernel_policy({**STRICT, "kernels": {"conv": [kernel, "torch"]}}):
        assert torch.autograd.gradcheck(lambda *given: F.conv2d(*given, **options), wanted)
        ops = {op for op, _, _ in served()}
        assert torch.autograd.gradgradcheck(lambda *given: F.conv2d(*given, **options), wanted, fast_mode=True)
    assert ops == {"conv", INPUT, WEIGHT}
    assert {chosen for _, chosen, _ in served()} == {kernel}


def test_one_dimension():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 9), (4, 3, 3), (4,)))
    with xt.kernel_policy(conv="cpu.gemm_conv"):
        assert torch.autograd.gradcheck(lambda *given: F.conv1d(*given, stride=2, padding=1), (x, weight, bias))
        xrt.clear_decisions()
        gradients = torch.autograd.grad(F.conv1d(x, weight, bias).sum(), (x, weight, bias))
    assert [gradient.shape for gradient in gradients] == [x.shape, weight.shape, bias.shape]
    assert served() == [("conv", "cpu.gemm_conv", 1), (INPUT, "cpu.gemm_conv", 1), (WEIGHT, "cpu.gemm_conv", 1)]


@pytest.mark.parametrize("mask", [m for m in itertools.product((True, False), repeat=3) if any(m)], ids=str)
def test_only_what_is_asked_for_is_computed(mask):
    x, weight, _ = arguments()
    out = F.conv2d(x, weight, groups=2).detach()
    args = (out, x.detach(), weight.detach(), [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 2, list(mask))
    expected = torch.ops.aten.convolution_backward(*args)
    with xt.kernel_policy(conv="cpu.gemm_conv"):
        found = torch.ops.aten.convolution_backward(*args)
    for one, other, wanted in zip(found, expected, mask, strict=True):
        assert (one is not None) is wanted
        if wanted:
            torch.testing.assert_close(one, other)
    assert [op for op, _, _ in served()] == [op for op, wanted in zip((INPUT, WEIGHT), mask, strict=False) if wanted]


def test_a_rule_for_the_backward_alone():
    wanted = arguments(bias=False)
    rules = [{"match": {"op": "conv", "phase": "backward"}, "use": "cpu.gemm_conv"}]
    expected = torch.autograd.grad(F.conv2d(*wanted, groups=2).sum(), wanted)
    with xt.kernel_policy({**STRICT, "kernels": {"rules": rules}}):
        grad = torch.autograd.grad(F.conv2d(*wanted, groups=2).sum(), wanted)
    torch.testing.assert_close(grad, expected)
    assert served() == [(INPUT, "cpu.gemm_conv", 1), (WEIGHT, "cpu.gemm_conv", 1)]


def test_a_rule_that_leaves_the_backward_to_pytorch():
    wanted = arguments(bias=False)
    rules = [{"match": {"op": "conv", "phase": "backward"}, "use": "torch"}]
    with xt.kernel_policy({**STRICT, "kernels": {"conv": "cpu.gemm_conv", "rules": rules}}):
        torch.autograd.grad(F.conv2d(*wanted, groups=2).sum(), wanted)
    assert served() == [("conv", "cpu.gemm_conv", 1)]


def test_a_gradient_that_a_kernel_cannot_compute_is_said_or_refused():
    wanted = arguments(torch.bfloat16, bias=False)
    rules = [
        {"match": {"op": "conv", "phase": "backward"}, "use": "cpu.gemm_conv"},
        {"match": {"op": "conv"}, "use": "torch"},
    ]
    out = F.conv2d(*wanted, groups=2)
    expected = torch.autograd.grad(out.sum(), wanted, retain_graph=True)
    said = r"aten::convolution_backward .*runs by torch\.conv.*rules\[0\].*multiplies fp32 and fp64"
    with xt.kernel_policy(rules=rules), pytest.warns(XpuRuntimeWarning, match=said):
        grad = torch.autograd.grad(out.sum(), wanted, retain_graph=True)
    assert all(map(torch.equal, grad, expected))
    refused = pytest.raises(UnsupportedOperationError, match=r"convolution_backward.*kernels\.rules\[0\] asks for")
    with xt.kernel_policy({**STRICT, "kernels": {"rules": rules}}), refused:
        torch.autograd.grad(out.sum(), wanted)


OTHERS = {
    "in one and two dimensions, and this has 3": lambda: F.conv3d(
        torch.ones(1, 2, 4, 4, 4, requires_grad=True), torch.ones(2, 2, 2, 2, 2)
    ),
    "a transposed convolution": lambda: F.conv_transpose2d(
        torch.ones(1, 2, 4, 4, requires_grad=True), torch.ones(2, 2, 2, 2)
    ),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_ours_cannot_do_is_said_or_refused(reason):
    rules = [{"match": {"op": "conv", "phase": "backward"}, "use": "cpu.reference"}]
    with xt.kernel_policy(rules=rules), pytest.warns(XpuRuntimeWarning, match=f"convolution_backward.*{reason}"):
        OTHERS[reason]().sum().backward()
    strict = {**STRICT, "kernels": {"rules": rules}}
    with xt.kernel_policy(strict), pytest.raises(UnsupportedOperationError, match=f"convolution_backward.*{reason}"):
        OTHERS[reason]().sum().backward()
    assert served() == []


@pytest.mark.parametrize("size", [(0, 2, 4, 4), (2, 2, 4, 4)], ids=["no image", "images"])
def test_an_empty_batch_and_gradients_that_are_one_number(size):
    """The gradient of a sum is one number, seen at every place; of nothing, it is nothing."""
    x, weight = torch.randn(size, requires_grad=True), torch.randn(3, 2, 2, 2, requires_grad=True)
    expected = torch.autograd.grad(F.conv2d(x, weight).sum(), (x, weight))
    with xt.kernel_policy(conv="cpu.gemm_conv"):
        grad = torch.autograd.grad(F.conv2d(x, weight).sum(), (x, weight))
    torch.testing.assert_close(grad, expected)
    assert len(served()) == (3 if size[0] else 0)


def test_autocast_and_channels_last():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    def run():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = run()
    with xt.kernel_policy(conv="cpu.reference"):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
    counts: dict[str, int] = {}
    for op, chosen, count in served():
        assert chosen == "cpu.reference"
        counts[op] = counts.get(op, 0) + count
    assert counts == {"conv": 2, INPUT: 1, WEIGHT: 2}


def test_bits_repeat_where_pytorch_is_asked_for_that():
    wanted = [torch.randn(s, requires_grad=True) for s in ((8, 16, 20, 20), (16, 16, 3, 3))]
    torch.use_deterministic_algorithms(True)
    try:
        with xt.kernel_policy({**STRICT, "kernels": {"conv": "cpu.gemm_conv"}}):
            runs = [torch.autograd.grad(F.conv2d(*wanted).square().sum(), wanted) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *runs))
    assert all("deterministic" in decision.description for decision in xrt.decisions())


def test_a_free_choice_by_measuring_takes_what_is_right():
    wanted = [torch.randn(s, requires_grad=True) for s in ((2, 8, 12, 12), (8, 8, 3, 3))]
    expected = torch.autograd.grad(F.conv2d(*wanted).square().sum(), wanted)
    policy = xrt.KernelPolicy(conv="auto", auto_strategy="best_performance")
    with xt.kernel_policy(policy), xt.explain() as report:
        gradients = torch.autograd.grad(F.conv2d(*wanted).square().sum(), wanted)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    (row,) = (row for row in report.rows if row.operator == "aten::convolution_backward")
    assert (row.requested, row.count, row.phase) == (("auto",), 1, "backward")


def test_explain_shows_the_gradient_as_asked():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    x = torch.randn(2, 3, 8, 8)
    with xt.kernel_policy(conv="cpu.gemm_conv"), xt.explain() as report:
        model(x).sum().backward()
    (row,) = (row for row in report.rows if row.operator == "aten::convolution_backward")
    assert (row.op, row.phase, row.module, row.count) == ("conv", "backward", "0", 1)
    assert (row.requested, row.resolved, row.status) == (("cpu.gemm_conv",), "cpu.gemm_conv", "honoured")
    assert report.require(coverage=1.0) is report
