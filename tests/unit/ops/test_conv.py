# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xpuruntime.ops.conv2d` and its gradients on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recording_kernel import Recorder

import xpuruntime as xrt
from xpuruntime import InputError, UnsupportedOperationError, _core, ops

F32 = np.float32
DRAW = np.random.default_rng(4)


def randn(*shape: int, dtype: Any = F32) -> Any:
    return DRAW.standard_normal(shape).astype(dtype)


def plain(x: Any, weight: Any, stride: tuple[int, int], pads: tuple[int, ...], dilation: tuple[int, int], groups: int):
    """The definition, one output position at a time, in float64."""
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    n, _, height, width = x.shape
    outs, ins, kh, kw = weight.shape
    rows = (height - (kh - 1) * dilation[0] - 1) // stride[0] + 1
    columns = (width - (kw - 1) * dilation[1] - 1) // stride[1] + 1
    out = np.zeros((n, outs, rows, columns))
    for o in range(outs):
        first = o // (outs // groups) * ins
        for i in range(kh):
            for j in range(kw):
                y, z = i * dilation[0], j * dilation[1]
                part = x[
                    :,
                    first : first + ins,
                    y : y + rows * stride[0] : stride[0],
                    z : z + columns * stride[1] : stride[1],
                ]
                out[:, o] += np.einsum("nchw,c->nhw", part[:, :, :rows, :columns], weight[o, :, i, j])
    return out


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
@pytest.mark.parametrize("padding", [0, 1, (2, 1), (0, 1, 2, 0)])
@pytest.mark.parametrize("stride", [1, (2, 3)])
def test_against_the_definition(stride: Any, padding: Any, dilation: Any, groups: int) -> None:
    x, weight, bias = randn(2, 4, 9, 11), randn(8, 4 // groups, 3, 2), randn(8)
    out = ops.conv2d(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
    pads = {int: lambda: (padding,) * 4, tuple: lambda: (padding * 2)[:4]}[type(padding)]()
    pair = [(value, value) if isinstance(value, int) else value for value in (stride, dilation)]
    want = plain(x, weight, pair[0], pads, pair[1], groups) + bias[:, None, None]
    assert out.shape == want.shape
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


def test_channels_last_in_and_out(recorder: Callable[[str], Recorder]) -> None:
    x = randn(2, 5, 6, 3).transpose(0, 3, 1, 2)
    weight = randn(4, 3, 2, 2)
    out = ops.conv2d(x, weight)
    assert out.shape == (2, 4, 4, 5)
    assert out.transpose(0, 2, 3, 1).flags.c_contiguous
    np.testing.assert_allclose(out, ops.conv2d(np.ascontiguousarray(x), weight), rtol=1e-5, atol=1e-5)
    kernel = recorder("conv")
    ops.conv2d(x, weight, kernel=kernel.id)
    assert kernel.seen["x"] == ((2, 3, 5, 6), (90, 1, 18, 3), x.ctypes.data)
    assert kernel.seen["out"][1] == (80, 1, 20, 4)


def test_views_are_not_copied(recorder: Callable[[str], Recorder]) -> None:
    kernel = recorder("conv")
    x = randn(3, 4, 10, 12)[1:, 1:, 2:8, ::-1]
    out = np.zeros((2, 5, 8, 20), F32)[:, :, 1:6, 4:15]
    ops.conv2d(x, randn(5, 3, 2, 2), out=out, kernel=kernel.id)
    assert kernel.seen["x"] == ((2, 3, 6, 12), (480, 120, 12, -1), x.ctypes.data)
    assert kernel.seen["out"] == ((2, 5, 5, 11), (800, 160, 20, 1), out.ctypes.data)


@pytest.mark.parametrize(("n", "c", "o"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing(n: int, c: int, o: int) -> None:
    bias = randn(o)
    out = ops.conv2d(randn(n, c, 5, 5), randn(o, c, 3, 3), bias)
    np.testing.assert_array_equal(out, np.broadcast_to(bias[:, None, None], (n, o, 3, 3)) if c == 0 else out)
    assert out.shape == (n, o, 3, 3)


def test_numbers_of_numpy_are_numbers() -> None:
    x, weight = randn(1, 2, 6, 6), randn(2, 2, 3, 3)
    want = ops.conv2d(x, weight, stride=2, padding=1)
    np.testing.assert_array_equal(ops.conv2d(x, weight, stride=np.int64(2), padding=np.array([1, 1])), want)
    np.testing.assert_array_equal(ops.conv2d(x, weight, stride=np.array(2), padding=[np.int8(1), 1]), want)


X, WEIGHT = randn(2, 4, 5, 5), randn(6, 4, 3, 3)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (lambda: ops.conv2d(X[0], WEIGHT), r"'x' \[4, 5, 5\].*3 dimensions; expected \[batch, channels, height"),
    "channels": (lambda: ops.conv2d(X, WEIGHT[:, :3]), r"'weight' \[6, 3, 3, 3\].*does not fit 'x'.*must be 4"),
    "dtype": (lambda: ops.conv2d(X, WEIGHT.astype(np.float64)), "'weight'.*another dtype than 'x'"),
    "integers": (lambda: ops.conv2d(X.astype(int), WEIGHT.astype(int)), "'x'.*dtype without convolution"),
    "bias": (lambda: ops.conv2d(X, WEIGHT, randn(5)), r"'bias' \[5\].*must be \[6\], one for each output channel"),
    "kernel": (lambda: ops.conv2d(X, WEIGHT[:, :, :0]), "'weight'.*has an empty kernel"),
    "reach": (lambda: ops.conv2d(X, WEIGHT, dilation=3), "reaches over 7 elements, more than the 5 of 'x'"),
    "stride": (lambda: ops.conv2d(X, WEIGHT, stride=0), "stride has 0; expected numbers from 1 on"),
    "strides": (lambda: ops.conv2d(X, WEIGHT, stride=(1, 2, 3)), r"stride is \(1, 2, 3\). Fix: give a whole number or"),
    "padding": (lambda: ops.conv2d(X, WEIGHT, padding=-1), "padding is .*not negative"),
    "no padding": (lambda: ops.conv2d(X, WEIGHT, padding="same"), r"padding is 'same'.*\(top, left, bottom, right\)"),
    "dilation": (lambda: ops.conv2d(X, WEIGHT, dilation=0), "dilation has 0"),
    "groups": (lambda: ops.conv2d(X, WEIGHT, groups=3), "groups is 3, which"),
    "huge": (lambda: ops.conv2d(X, WEIGHT, stride=2**40), "stride is"),
    "out": (lambda: ops.conv2d(X, WEIGHT, out=np.zeros((2, 6, 3, 4), F32)), r"'out'.*the result is \[2, 6, 3, 3\]"),
    "activation": (lambda: ops.conv2d(X, WEIGHT, activation="tanh"), "activation 'tanh' is not known"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_name_the_argument(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(InputError, match=said):
        call()


KERNELS = ("cpu.gemm_conv", "cpu.reference")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
@pytest.mark.parametrize("padding", [0, (2, 1), (0, 1, 2, 0)])
@pytest.mark.parametrize("stride", [1, (2, 3)])
def test_gradients_are_the_derivatives_of_the_forward(
    stride: Any, padding: Any, dilation: Any, groups: int, kernel: str
) -> None:
    """The convolution is linear in x and in weight, so its change is that of its gradients exactly."""
    x, weight = randn(2, 4, 9, 12, dtype=np.float64), randn(8, 4 // groups, 3, 2, dtype=np.float64)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "kernel": kernel}
    out = ops.conv2d(x, weight, **how)
    grad_out = randn(*out.shape, dtype=np.float64)
    grad_x = ops.conv2d_input_gradient(grad_out, weight, (9, 12), **how)
    grad_weight = ops.conv2d_weight_gradient(grad_out, x, (3, 2), **how)
    assert (grad_x.shape, grad_weight.shape) == (x.shape, weight.shape)
    for of, gradient in ((x, grad_x), (weight, grad_weight)):
        assert np.vdot(of, gradient) == pytest.approx(np.vdot(out, grad_out), rel=1e-10)
        for _ in range(3):
            step = randn(*of.shape, dtype=np.float64)
            change = ops.conv2d(*((step, weight) if of is x else (x, step)), **how)
            assert np.vdot(step, gradient) == pytest.approx(np.vdot(change, grad_out), rel=1e-9, abs=1e-9)


def test_layouts_of_gradients(recorder: Callable[[str], Recorder]) -> None:
    x = randn(2, 5, 6, 3).transpose(0, 3, 1, 2)
    grad_out = randn(2, 4, 5, 4).transpose(0, 3, 1, 2)
    weight = randn(4, 3, 2, 2)
    grad_x = ops.conv2d_input_gradient(grad_out, weight, (5, 6))
    grad_weight = ops.conv2d_weight_gradient(grad_out, x, 2)
    assert grad_x.transpose(0, 2, 3, 1).flags.c_contiguous
    assert grad_weight.transpose(0, 2, 3, 1).flags.c_contiguous
    plain = np.ascontiguousarray
    np.testing.assert_allclose(grad_x, ops.conv2d_input_gradient(plain(grad_out), weight, (5, 6)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        grad_weight, ops.conv2d_weight_gradient(plain(grad_out), plain(x), 2), rtol=1e-5, atol=1e-5
    )
    kernel = recorder("conv_weight_gradient")
    into = np.zeros((4, 3, 2, 4), F32)[..., ::2]
    assert ops.conv2d_weight_gradient(grad_out, x, 2, grad_weight=into, kernel=kernel.id) is into
    assert kernel.seen["x"] == ((2, 3, 5, 6), (90, 1, 18, 3), x.ctypes.data)
    assert kernel.seen["grad_weight"] == ((4, 3, 2, 2), (24, 8, 4, 2), into.ctypes.data)


def test_what_no_result_reaches_has_no_gradient() -> None:
    """With stride 4 and a kernel of 2, half of x is never read."""
    grad_x = np.full((1, 1, 6, 7), np.nan, F32)
    ops.conv2d_input_gradient(np.ones((1, 1, 2, 2), F32), np.ones((1, 1, 2, 2), F32), (6, 7), stride=4, grad_x=grad_x)
    want = np.zeros((6, 7), F32)
    for row in (0, 1, 4, 5):
        want[row, [0, 1, 4, 5]] = 1
    np.testing.assert_array_equal(grad_x[0, 0], want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_nothing(kernel: str) -> None:
    none, weight = np.zeros((0, 4, 3, 3), F32), randn(4, 2, 3, 3)
    assert ops.conv2d_input_gradient(none, weight, 5, kernel=kernel).shape == (0, 2, 5, 5)
    grad_weight = np.full((4, 2, 3, 3), np.nan, F32)
    ops.conv2d_weight_gradient(none, np.zeros((0, 2, 5, 5), F32), 3, grad_weight=grad_weight, kernel=kernel)
    np.testing.assert_array_equal(grad_weight, 0)


def test_the_policy_of_convolutions_decides_and_sees_a_backward() -> None:
    grad_out, x, weight = (
        randn(1, 2, 3, 3, dtype=np.float64),
        randn(1, 2, 4, 4, dtype=np.float64),
        randn(2, 2, 2, 2, dtype=np.float64),
    )
    rule = {"match": {"op": "conv", "phase": "backward"}, "use": "cpu.reference"}
    xrt.clear_decisions()
    with xrt.use_policy(xrt.Policy(kernels=xrt.KernelPolicy(conv="cpu.gemm_conv", rules=[rule]))):
        ops.conv2d(x, weight)
        ops.conv2d_input_gradient(grad_out, weight, 4)
        ops.conv2d_weight_gradient(grad_out, x, 2)
    assert [(decision.op, decision.chosen, decision.phase) for decision in xrt.decisions()] == [
        ("conv", "cpu.gemm_conv", "infer"),
        ("conv_input_gradient", "cpu.reference", "backward"),
        ("conv_weight_gradient", "cpu.reference", "backward"),
    ]


def test_a_kernel_that_cannot_is_refused_with_its_reason() -> None:
    half = randn(1, 2, 3, 3, dtype=np.float16)
    with pytest.raises(UnsupportedOperationError, match=r"OpenBLAS multiplies fp32 and fp64, and this is float16"):
        ops.conv2d_weight_gradient(half, randn(1, 2, 4, 4, dtype=np.float16), 2, kernel="cpu.gemm_conv")
    last = randn(2, 2, 2, 3, dtype=np.float64).transpose(0, 3, 1, 2)
    with pytest.raises(UnsupportedOperationError, match=r"needs 'weight' with its last three dimensions contiguous"):
        ops.conv2d_input_gradient(randn(1, 2, 3, 3, dtype=np.float64), last, 4, kernel="cpu.gemm_conv")


GRAD = randn(2, 6, 3, 3)
BAD_GRADIENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (lambda: ops.conv2d_input_gradient(GRAD[0], WEIGHT, 5), r"'grad_out' \[6, 3, 3\].*out_height, out_width\]"),
    "size": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT, 6), "height 6 with a kernel of 3 gives 4"),
    "width": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT, (5, 2)), "width 2 with a kernel of 3 gives nothing"),
    "channels": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT[:5], 5), "'grad_out'.*its dimension 1 must be 5"),
    "dtype": (lambda: ops.conv2d_weight_gradient(GRAD, X.astype(float), 3), "'x'.*another dtype than 'grad_out'"),
    "integers": (lambda: ops.conv2d_weight_gradient(GRAD.astype(int), X.astype(int), 3), "dtype without convolution"),
    "images": (lambda: ops.conv2d_weight_gradient(GRAD, X[:1], 3), "'grad_out'.*its dimension 0 must be 1"),
    "kernel": (lambda: ops.conv2d_weight_gradient(GRAD, X, 4), "height 5 with a kernel of 4 gives 2"),
    "no kernel": (lambda: ops.conv2d_weight_gradient(GRAD, X, 0), "kernel_size has 0"),
    "groups": (lambda: ops.conv2d_weight_gradient(GRAD, X, 3, groups=3), "groups is 3, which does not divide"),
    "out": (lambda: ops.conv2d_weight_gradient(GRAD, X, 3, grad_weight=WEIGHT[:4]), "'grad_weight'.*wrong shape"),
    "over": (lambda: ops.conv2d_input_gradient(X, WEIGHT[:4], 5, padding=1, grad_x=X), "shares memory with 'grad_out'"),
}


@pytest.mark.parametrize("what", BAD_GRADIENTS)
def test_bad_calls_of_gradients_name_the_argument(what: str) -> None:
    call, said = BAD_GRADIENTS[what]
    with pytest.raises(InputError, match=said):
        call()


KERNEL = "cuda_raw.depthwise_conv"
LAST = (768, 1, 96, 8)  # of [2, 8, 8, 12]


def answer(capability: tuple[int, int] = (9, 0), dtype: str = "float16", **changed: Any) -> str:
    """Return why the kernel refuses a convolution of 3x3 with these changes, or nothing."""
    shapes: dict[str, Any] = {
        "x": (2, 8, 8, 12), "weight": (8, 1, 3, 3), "bias": (8,), "out": (2, 8, 8, 12),
    }  # fmt: skip
    attributes: dict[str, Any] = {"groups": 8, "stride": (1, 1), "dilation": (1, 1), "padding": (1, 1, 1, 1)}
    operands = {name: {"dtype": dtype, "shape": changed.pop(name, shape)} for name, shape in shapes.items()}
    for name, operand in changed.pop("operands", {}).items():
        operands[name] |= operand
    desc = {"op": "conv", "device": changed.pop("device", "cuda:0"), "operands": operands}
    desc["attributes"] = attributes | changed
    found = _core.KernelRegistry.instance().supports(desc, compute_capability=capability)
    ((_, fits, reason),) = (one for one in found if one[0] == KERNEL)
    assert fits == (not reason)
    return str(reason)


@pytest.mark.needs_build("cuda")
@pytest.mark.parametrize(
    "served",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "capability": (8, 0)},
        {"activation": "gelu_tanh"},
        {"stride": (2, 3), "dilation": (4, 1), "padding": (9, 0, 0, 7)},
        {"weight": (8, 1, 11, 4)},
        {"operands": {"x": {"strides": LAST}, "out": {"strides": LAST}}},
        {"operands": {"x": {"strides": (4000, 500, 40, 3)}, "weight": {"strides": (1, 1, 24, 8)}}},
        {"operands": {"x": {"alignment": 2}, "out": {"alignment": 2}}},
        {"x": (0, 8, 8, 12), "out": (0, 8, 8, 12)},
        {"x": (2, 1, 8, 12), "weight": (1, 1, 3, 3), "bias": (1,), "out": (2, 1, 8, 12), "groups": 1},
    ],
)
def test_depthwise_is_served(served: dict[str, Any]) -> None:
    assert not answer(**served)


@pytest.mark.needs_build("cuda")
@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({"dtype": "float64"}, "not float64"),
        ({"capability": (7, 5)}, "7.x and this kernel needs 8.0"),
        ({"groups": 1, "weight": (8, 8, 3, 3)}, "8 channels in 1 groups and 8 filters"),
        ({"weight": (16, 1, 3, 3), "bias": (16,), "out": (2, 16, 8, 12)}, "8 groups and 16 filters"),
        ({"operands": {"weight": {"dtype": "float32"}}}, "'weight' is float32 and x is float16"),
        ({"operands": {"out": {"alignment": 1}}}, "'out' is not aligned to its own element of 2 bytes"),
        ({"device": "cpu"}, "another kind of device"),
    ],
)
def test_depthwise_is_refused_with_the_reason(refused: dict[str, Any], said: str) -> None:
    assert said in answer(**refused)


@pytest.mark.needs_build("cuda")
def test_a_depthwise_kernel_is_listed_and_named_by_its_backend() -> None:
    (row,) = (kernel for kernel in ops.kernels("conv") if kernel.id == KERNEL)
    assert row.automatic
    assert "3x3, 5x5 and 7x7" in row.limits
    assert _core.KernelRegistry.instance().find("conv", "cuda_raw") == [KERNEL]
