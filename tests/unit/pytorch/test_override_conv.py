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


INPUT, WEIGHT = "conv_input_gradient", "conv_weight_gradient"


STRICT = {"schema": "xpuruntime.policy/1", "mode": "strict"}


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
