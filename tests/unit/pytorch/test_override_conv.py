# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Convolutions under a policy: results, gradients and memory formats as PyTorch gives them."""

from __future__ import annotations

import itertools
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
F = torch.nn.functional

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
    torch.float16: {"rtol": 3e-3, "atol": 5e-3},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the operands are tiny
    yield
    torch.set_num_threads(before)


def served() -> list[tuple[str, str, int]]:
    return [(decision.op, decision.chosen, decision.count) for decision in xrt.decisions()]


def steps(x):
    """Return the strides of the dimensions that have a second element."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def alike(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape, steps(one)) == (other.dtype, other.shape, steps(other))
        torch.testing.assert_close(one, other, **tolerance)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, :, ::2],
    "transposed": lambda x: x.mT,
}
KINDS = {
    "plain": {},
    "strided": {"stride": (2, 1)},
    "padded": {"padding": (1, 2)},
    "same": {"padding": "same", "dilation": 2},
    "dilated": {"dilation": (1, 2), "padding": 1, "stride": 2},
}
#: Channels in and out, and groups.
CHANNELS = ((3, 4, 1), (4, 6, 2), (1, 1, 1), (4, 8, 4))
USABLE = [
    *itertools.product(["cpu.reference"], CLOSE),
    ("cpu.gemm_conv", torch.float32),
    ("cpu.gemm_conv", torch.float64),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kernel", "dtype"), USABLE, ids=str)
def test_results_gradients_and_layouts_are_those_of_pytorch(kernel, dtype, kind):
    for (channels, outputs, groups), layout, (last, biased) in itertools.product(
        CHANNELS, LAYOUTS, ((False, True), (True, False))
    ):
        x = LAYOUTS[layout](torch.randn(2, channels, 9, 8).to(dtype)).requires_grad_()
        weight = torch.randn(outputs, channels // groups, 3, 2).to(dtype)
        weight = (weight.contiguous(memory_format=torch.channels_last) if last else weight).requires_grad_()
        bias = torch.randn(outputs).to(dtype).requires_grad_() if biased else None
        wanted = (x, weight, bias) if biased else (x, weight)

        def run(x=x, weight=weight, bias=bias, groups=groups, wanted=wanted):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using padding='same'", UserWarning)
                out = F.conv2d(x, weight, bias, groups=groups, **KINDS[kind])
            return [out, *torch.autograd.grad(out.sum(), wanted)]

        expected = run()
        xrt.clear_decisions()
        with xt.kernel_policy(conv=kernel):
            found = run()
        alike(found, expected, **CLOSE[dtype])
        assert served() == [("conv", kernel, 1), *((f"conv_{of}_gradient", kernel, 1) for of in ("input", "weight"))]


@pytest.fixture(params=[False, True], ids=["without oneDNN", "with oneDNN"])
def onednn(request):
    # torch.backends.mkldnn.flags warns of a switch that it sets as well.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(request.param)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("of_x", LAYOUTS)
def test_layouts_of_one_pixel_are_those_of_pytorch(of_x):
    # A weight of one pixel is contiguous in both layouts, and its strides alone say which one was meant.
    for channels, groups, last in itertools.product((1, 4), (1, 4), (False, True)):
        if channels % groups:
            continue
        x = LAYOUTS[of_x](torch.randn(2, channels, 6, 6))
        weight = torch.randn(4, channels // groups, 1, 1)
        weight = (
            weight.to(memory_format=torch.channels_last) if last else weight
        )  # contiguous() would leave it as it is
        expected = F.conv2d(x, weight, groups=groups)
        with xt.kernel_policy(conv="cpu.gemm_conv"):
            found = F.conv2d(x, weight, groups=groups)
        alike([found], [expected], **CLOSE[torch.float32])


@pytest.mark.parametrize("shape", [(2, 3, 9), (3, 9)], ids=str)
@pytest.mark.parametrize("flipped", [False, True])
def test_one_dimension(shape, flipped):
    x = torch.randn(shape[::-1] if flipped else shape)
    x = x.permute(*reversed(range(x.dim()))) if flipped else x
    weight, bias = torch.randn(4, 3, 3), torch.randn(4)
    if x.dim() == 3 and flipped:
        assert x.shape == shape
    expected = F.conv1d(x, weight, bias, stride=2, padding=1)
    with xt.kernel_policy(conv="cpu.gemm_conv"):
        found = F.conv1d(x, weight, bias, stride=2, padding=1)
    alike([found], [expected], **CLOSE[torch.float32])
    assert served() == [("conv", "cpu.gemm_conv", 1)]


def test_modules_autocast_and_derivatives_of_derivatives():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.SiLU(), torch.nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    with xt.kernel_policy(conv="cpu.reference"):
        assert torch.autograd.gradcheck(model, x, fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(model, x, fast_mode=True)
    assert {(op, kernel) for op, kernel, _ in served()} == {
        (op, "cpu.reference") for op in ("conv", "conv_input_gradient")
    }
    model, x = model.float(), x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        xrt.clear_decisions()
        with xt.kernel_policy(conv="cpu.reference"):
            found = model(x)
    alike([found], [expected], **CLOSE[torch.bfloat16])
    assert found.dtype == torch.bfloat16
    assert sum(count for _, _, count in served()) == 2


OTHERS = {
    "three dimensions": lambda: F.conv3d(torch.ones(1, 2, 4, 4, 4), torch.ones(2, 2, 2, 2, 2)),
    "transposed": lambda: F.conv_transpose2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_ours_cannot_do_is_said_or_refused(name):
    expected = OTHERS[name]()
    reason = {"three dimensions": "in one and two dimensions, and this has 3", "transposed": "a transposed convolution"}
    with xt.kernel_policy(conv="cpu.gemm_conv"), pytest.warns(XpuRuntimeWarning, match=reason[name]):
        assert torch.equal(OTHERS[name](), expected)
    strict = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"conv": "cpu.gemm_conv"}}
    with xt.kernel_policy(strict), pytest.raises(UnsupportedOperationError, match=reason[name]):
        OTHERS[name]()
    allowed = {**strict, "kernels": {"conv": ["cpu.gemm_conv", "torch"]}}
    with xt.kernel_policy(allowed):
        assert torch.equal(OTHERS[name](), expected)


def test_the_kernel_of_a_device_that_is_not_there():
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 2, 2)
    with xt.kernel_policy(conv="cudnn"), pytest.warns(XpuRuntimeWarning, match=r"runs by torch\.conv"):
        F.conv2d(x, weight)


WRONG = {
    "channels": lambda: F.conv2d(torch.ones(1, 3, 4, 4), torch.ones(2, 2, 2, 2)),
    "groups": lambda: F.conv2d(torch.ones(1, 4, 4, 4), torch.ones(3, 2, 2, 2), groups=2),
    "bias": lambda: F.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2), torch.ones(3)),
    "too small": lambda: F.conv2d(torch.ones(1, 2, 2, 2), torch.ones(2, 2, 3, 3)),
    "dtype": lambda: F.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2, dtype=torch.float64)),
    "stride": lambda: F.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2), stride=0),
    "padding": lambda: F.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2), padding=-1),
    "dilation": lambda: F.conv2d(torch.ones(1, 2, 4, 4), torch.ones(2, 2, 2, 2), dilation=0),
    "dimensions": lambda: F.conv2d(torch.ones(2, 4), torch.ones(2, 2, 2, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_pytorch(name):
    with pytest.raises((RuntimeError, TypeError)) as expected:
        WRONG[name]()
    with xt.kernel_policy(conv="cpu.reference"), pytest.raises((RuntimeError, TypeError)) as found:
        WRONG[name]()
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))


@pytest.mark.parametrize("size", [(0, 2, 4, 4), (1, 0, 4, 4)], ids=str)
def test_nothing_to_convolve(size):
    x, weight = torch.ones(size), torch.ones(3, size[1], 2, 2)
    expected = F.conv2d(x, weight)
    with xt.kernel_policy(conv="cpu.reference"):
        alike([F.conv2d(x, weight)], [expected])
    assert served() == []


def test_complex_numbers_are_convolved_by_parts():
    x, weight = torch.randn(1, 2, 4, 4, dtype=torch.complex64), torch.randn(2, 2, 2, 2, dtype=torch.complex64)
    expected = F.conv2d(x, weight)
    with xt.kernel_policy(conv="cpu.reference"):
        torch.testing.assert_close(F.conv2d(x, weight), expected, rtol=1e-4, atol=1e-4)
    assert sum(count for _, _, count in served()) == 3  # PyTorch makes three real ones of it


def test_vmap():
    x, weight = torch.randn(3, 2, 4, 6, 6), torch.randn(5, 4, 3, 3)
    expected = torch.vmap(lambda one: F.conv2d(one, weight))(x)
    with xt.kernel_policy(conv="cpu.gemm_conv"):
        found = torch.vmap(lambda one: F.conv2d(one, weight))(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert served() == [("conv", "cpu.gemm_conv", 1)]


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_inductor_calls_the_kernel(training):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    with xt.kernel_policy(conv="cpu.gemm_conv"), torch.set_grad_enabled(training):
        out = torch.compile(model, fullgraph=True)(x)
        if training:
            out.sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    gradients = ["conv_weight_gradient"] if training else []  # no input wants one
    assert served() == [(op, "cpu.gemm_conv", 1) for op in ("conv", *gradients)]
