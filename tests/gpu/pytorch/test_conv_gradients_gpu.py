# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gradients of convolutions on CUDA under a policy: held to float64, repeated, rounded and pinned as asked."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime import ops
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

KERNELS = ("cudnn.conv_heuristic", "cudnn.conv_default", "cudnn.conv_exhaustive")
OPS = ("conv", "conv_input_gradient", "conv_weight_gradient")
STRICT = {"schema": "xpuruntime.policy/1", "mode": "strict"}
#: Largest error, as a part of the largest number.
TOLERANCE = {torch.float32: 2**-15, torch.bfloat16: 2**-7, torch.float16: 2**-9}
SIZES = {
    "plain": ((16, 32, 1), (3, 3), {"padding": 1}),
    "strided": ((16, 32, 1), (3, 3), {"padding": 1, "stride": 2}),
    "dilated": ((16, 8, 1), (3, 3), {"padding": 2, "dilation": 2}),
    "grouped": ((32, 64, 4), (3, 3), {"padding": 1}),
    "pointwise": ((64, 64, 1), (1, 1), {}),
    "wide": ((8, 16, 1), (7, 7), {"padding": 3, "stride": 2}),
}


@pytest.fixture(autouse=True)
def _exact_and_clean():
    torch.manual_seed(0)
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.deterministic = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before
    xt.clear_kernel_policy()


def served() -> list[tuple[str, str]]:
    return [(decision.op, decision.chosen) for decision in xrt.decisions()]


def strict(kernel):
    return xt.kernel_policy({**STRICT, "kernels": {"conv": kernel}})


def operands(size, dtype, layout=torch.contiguous_format, images=4):
    (channels, outputs, groups), window, options = SIZES[size]
    x = torch.randn(images, channels, 24, 20, device="cuda").to(dtype).contiguous(memory_format=layout)
    weight = (torch.randn(outputs, channels // groups, *window, device="cuda") / 8).to(dtype)
    weight = weight.contiguous(memory_format=layout)
    return x.requires_grad_(), weight.requires_grad_(), {"groups": groups, **options}


def gradients(x, weight, options, grad=None):
    out = functional.conv2d(x, weight, **options)
    return torch.autograd.grad(out, (x, weight), torch.ones_like(out) if grad is None else grad)


def error(found, expected):
    return max(
        ((one.double() - other).abs().max() / other.abs().max()).item()
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_against_float64(kernel, dtype, size):
    for layout in (torch.contiguous_format, torch.channels_last):
        x, weight, options = operands(size, dtype, layout)
        grad = torch.randn_like(functional.conv2d(x, weight, **options))
        wide = [side.detach().double().requires_grad_() for side in (x, weight)]
        expected = gradients(*wide, options, grad.double())
        xrt.clear_decisions()
        with strict(kernel):
            found = gradients(x, weight, options, grad)
        assert error(found, expected) < TOLERANCE[dtype], layout
        assert served() == [(op, kernel) for op in OPS]
        for one, other in zip(found, (x, weight), strict=True):
            assert one.is_contiguous(memory_format=layout)
            assert (one.dtype, one.shape) == (other.dtype, other.shape)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bits_where_they_are_asked_for(kernel, dtype):
    torch.backends.cudnn.deterministic = True
    for layout, size in itertools.product((torch.contiguous_format, torch.channels_last), ("plain", "strided")):
        x, weight, options = operands(size, dtype, layout, images=32)
        grad = torch.randn_like(functional.conv2d(x, weight, **options))
        with strict(kernel):
            runs = [gradients(x, weight, options, grad) for _ in range(3)]
        for again in runs[1:]:
            assert all(map(torch.equal, again, runs[0])), (layout, size)
    assert all("deterministic" in decision.description for decision in xrt.decisions())


def test_the_switch_for_tf32_is_obeyed():
    x, weight = (torch.randn(s, device="cuda", requires_grad=True) for s in ((8, 64, 32, 32), (64, 64, 3, 3)))
    grad = torch.randn(8, 64, 30, 30, device="cuda")
    wide = [side.detach().double().requires_grad_() for side in (x, weight)]
    expected = gradients(*wide, {}, grad.double())
    errors = {}
    with strict("cudnn.conv_heuristic"):
        for allowed in (False, True):
            torch.backends.cudnn.allow_tf32 = allowed
            errors[allowed] = error(gradients(x, weight, {}, grad), expected)
    assert errors[False] < 1e-4
    assert errors[False] < errors[True] < 5e-3


def test_fp64_is_said_to_stay_pytorchs():
    x, weight = (torch.randn(2, 4, 8, 8, device="cuda", dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = gradients(x, weight, {})
    rules = [{"match": {"op": "conv", "phase": "backward"}, "use": "cudnn"}]
    said = pytest.warns(XpuRuntimeWarning, match=r"convolution_backward.*runs by torch\.conv.*not float64")
    with xt.kernel_policy(rules=rules), said:
        assert all(map(torch.equal, gradients(x, weight, {}), expected))
    with xt.kernel_policy({**STRICT, "kernels": {"rules": rules}}), pytest.raises(UnsupportedOperationError):
        gradients(x, weight, {})


def test_one_dimension_the_bias_and_autocast():
    model = torch.nn.Conv1d(16, 32, 3, stride=2, padding=1).cuda()
    x = torch.randn(4, 16, 50, device="cuda", requires_grad=True)

    def run():
        out = model(x)
        return torch.autograd.grad(out.float().square().sum(), (x, *model.parameters()))

    expected = run()
    with strict("cudnn.conv_heuristic"):
        for one, other in zip(run(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        assert served() == [(op, "cudnn.conv_heuristic") for op in OPS]
        with torch.autocast("cuda", torch.bfloat16):
            found = run()
    assert error(found, [one.double() for one in expected]) < 2e-2


def test_explain_sees_the_kernels_of_the_gradient():
    conv = torch.nn.Conv2d(16, 32, 3, padding=1).to("cuda", torch.float16)
    x = torch.randn(4, 16, 32, 32, device="cuda", dtype=torch.float16, requires_grad=True)

    def step():
        conv(x).float().sum().backward()

    with xt.kernel_policy(conv="cudnn.conv_heuristic"):
        step()
        with xt.explain() as report:
            step()
    (row,) = (row for row in report.rows if row.operator == "aten::convolution_backward")
    assert (row.phase, row.status) == ("backward", "honoured")
    assert row.resolved.partition("@")[0] == "cudnn.conv_heuristic"
    assert row.observed
    assert row.time_us > 0
    assert report.coverage.bypassed == 0


@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_plan_is_pinned_by_its_name(of):
    x, weight, options = operands("plain", torch.bfloat16, torch.channels_last)
    x, weight = x.detach(), weight.detach()
    grad = torch.randn_like(functional.conv2d(x, weight, **options))

    def run(kernel):
        if of == "input":
            return ops.conv2d_input_gradient(grad, weight, tuple(x.shape[2:]), kernel=kernel, **options)
        return ops.conv2d_weight_gradient(grad, x, tuple(weight.shape[2:]), kernel=kernel, **options)

    expected = run("cudnn.conv_default")
    config = xrt.decisions()[-1].config
    assert config.startswith("eng")
    assert torch.equal(run(f"cudnn.conv_heuristic@{config}"), expected)
    assert xrt.decisions()[-1].config == config
    with pytest.raises(UnsupportedOperationError, match="offers no plan eng999"):
        run("cudnn.conv_heuristic@eng999")


def test_a_graph_replays_the_gradients():
    x, weight, options = operands("plain", torch.float16, torch.channels_last)
    grad = torch.randn_like(functional.conv2d(x, weight, **options))
    out = functional.conv2d(x, weight, **options).detach()
    args = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    with torch.no_grad(), strict("cudnn.conv_default"):
        expected = torch.ops.aten.convolution_backward(grad, x, weight, *args)[:2]
        torch.cuda.synchronize()
        graph, static = torch.cuda.CUDAGraph(), torch.zeros_like(out)
        with torch.cuda.graph(graph):
            made = torch.ops.aten.convolution_backward(static, x, weight, *args)[:2]
    static.copy_(grad)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, made, expected))
