# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Convolutions under a policy on CUDA: results, gradients and memory formats as PyTorch gives them."""

from __future__ import annotations

import itertools
import uuid

import pytest
import torch
from torch.nn import functional

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import XpuRuntimeWarning

pytestmark = pytest.mark.torch

KERNELS = ("cudnn.conv_heuristic", "cudnn.conv_default", "cudnn.conv_exhaustive")
CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2},
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, :, ::2],
}
#: Channels in and out, groups; size of the kernel; the other arguments.
SIZES = {
    "plain": ((16, 32, 1), (3, 3), {"padding": 1}),
    "strided": ((16, 32, 1), (3, 3), {"padding": 1, "stride": 2}),
    "dilated": ((16, 8, 1), (3, 3), {"padding": 2, "dilation": 2}),
    "grouped": ((16, 32, 4), (3, 3), {"padding": (1, 0)}),
    "pointwise": ((64, 64, 1), (1, 1), {}),
    "few channels": ((3, 16, 1), (5, 3), {"stride": (2, 1)}),
}


def _no_cache():
    """Have Inductor compile anew: what an earlier run left on disk may be of another state of these sources."""
    return torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)


@pytest.fixture(autouse=True)
def _exact_and_clean():
    torch.manual_seed(0)
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
    xt.clear_kernel_policy()


def served() -> list[tuple[str, int]]:
    return [(decision.chosen, decision.count) for decision in xrt.decisions()]


def steps(x):
    """Return the strides of the dimensions that have a second element."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def alike(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape, steps(one)) == (other.dtype, other.shape, steps(other))
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS[:2])
def test_results_gradients_and_layouts_are_those_of_pytorch(kernel, dtype, size):
    (channels, outputs, groups), window, options = SIZES[size]
    for layout, last, biased in itertools.product(LAYOUTS, (False, True), (False, True)):
        x = LAYOUTS[layout](torch.randn(2, channels, 20, 16, device="cuda").to(dtype)).requires_grad_()
        weight = (torch.randn(outputs, channels // groups, *window, device="cuda") / 8).to(dtype)
        weight = (weight.contiguous(memory_format=torch.channels_last) if last else weight).requires_grad_()
        bias = torch.randn(outputs, device="cuda").to(dtype).requires_grad_() if biased else None
        wanted = (x, weight, bias) if biased else (x, weight)

        def run(x=x, weight=weight, bias=bias, wanted=wanted):
            out = functional.conv2d(x, weight, bias, groups=groups, **options)
            return [out, *torch.autograd.grad(out.float().mean(), wanted)]

        expected = run()
        xrt.clear_decisions()
        with xt.kernel_policy(conv=kernel):
            found = run()
        alike(found, expected, **CLOSE[dtype])
        assert served() == [(kernel, 1)] * 3, f"{layout}, weight channels last: {last}, bias: {biased}"


def test_every_kernel_and_the_family():
    model = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    x = torch.randn(4, 16, 24, 24, device="cuda")
    expected = model(x)
    for word in (*KERNELS, "cudnn", "cudnn_heuristic", "cudnn_default", "cudnn_exhaustive"):
        xrt.clear_decisions()
        with xt.kernel_policy(conv=word):
            alike([model(x)], [expected], **CLOSE[torch.float32])
        ((kernel, count),) = served()
        assert kernel.startswith("cudnn.conv_")
        assert count == 1
        if word in KERNELS:
            assert kernel == word
        elif word != "cudnn":
            assert kernel == word.replace("cudnn_", "cudnn.conv_")


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_depthwise_by_our_kernel(dtype):
    """It has no gradients: PyTorch computes these. What is not depthwise it leaves to PyTorch."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
        torch.nn.Conv2d(16, 24, 1),
        torch.nn.Conv2d(24, 24, 7, stride=2, padding=3, groups=24, bias=False),
    ).to("cuda", dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(3, 16, 20, 18, device="cuda").to(dtype, memory_format=layout).requires_grad_()
        wanted = (x, *model.parameters())

        def run(x=x, wanted=wanted):
            out = model(x)
            return [out, *torch.autograd.grad(out.float().mean(), wanted)]

        expected = run()
        xrt.clear_decisions()
        warned = pytest.warns(XpuRuntimeWarning, match=r"runs by torch\.conv, though kernels\.conv asks for cuda_raw")
        with warned, xt.kernel_policy(conv="cuda_raw"):
            found = run()
        alike(found, expected, **CLOSE[dtype])
        assert served() == [("cuda_raw.depthwise_conv", 1)] * 2, layout


def test_one_dimension_and_autocast():
    model = torch.nn.Conv1d(16, 32, 3, stride=2).cuda()
    x = torch.randn(4, 16, 50, device="cuda")
    expected = model(x)
    with xt.kernel_policy(conv="cudnn.conv_heuristic"):
        alike([model(x)], [expected], **CLOSE[torch.float32])
        with torch.autocast("cuda", torch.bfloat16):
            found = model(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=5e-2)
    assert sum(count for _, count in served()) == 2


def test_the_switch_for_tf32_is_obeyed():
    x, weight = torch.randn(4, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda") / 24
    true = functional.conv2d(x.double(), weight.double())
    errors = {}
    with xt.kernel_policy(conv="cudnn.conv_heuristic"):
        for allowed in (False, True):
            torch.backends.cudnn.allow_tf32 = allowed
            errors[allowed] = (functional.conv2d(x, weight).double() - true).abs().max().item()
    assert errors[False] < 1e-4
    assert errors[False] < errors[True] < 2e-2


def test_fp64_is_said_to_stay_pytorchs():
    x, weight = (torch.randn(2, 4, 8, 8, device="cuda", dtype=torch.float64) for _ in range(2))
    expected = functional.conv2d(x, weight)
    with xt.kernel_policy(conv="cudnn"), pytest.warns(XpuRuntimeWarning, match=r"runs by torch\.conv.*not float64"):
        assert torch.equal(functional.conv2d(x, weight), expected)


@pytest.mark.parametrize("training", [True, False])
def test_inductor_calls_the_kernel(training):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU()).cuda()
    x = torch.randn(2, 16, 20, 20, device="cuda")
    expected = model(x)
    with _no_cache(), xt.kernel_policy(conv="cudnn.conv_heuristic"), torch.set_grad_enabled(training):
        xrt.clear_decisions()
        out = torch.compile(model, fullgraph=True)(x)
        if training:
            out.sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    assert served() == [("cudnn.conv_heuristic", 1)] * (2 if training else 1)  # no input wants a gradient
