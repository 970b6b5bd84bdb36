# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The gradients of `xpuruntime.ops.conv2d` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recording_kernel import Recorder

import xpuruntime as xrt
from xpuruntime import InputError, UnsupportedOperationError, ops

F32 = np.float32
DRAW = np.random.default_rng(8)
KERNELS = ("cpu.gemm_conv", "cpu.reference")


def randn(*shape: int, dtype: Any = np.float64) -> Any:
    return DRAW.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
@pytest.mark.parametrize("padding", [0, (2, 1), (0, 1, 2, 0)])
@pytest.mark.parametrize("stride", [1, (2, 3)])
def test_they_are_the_derivatives_of_the_forward(
    stride: Any, padding: Any, dilation: Any, groups: int, kernel: str
) -> None:
    """The convolution is linear in x and in weight, so its change is that of its gradients exactly."""
    x, weight = randn(2, 4, 9, 12), randn(8, 4 // groups, 3, 2)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "kernel": kernel}
    out = ops.conv2d(x, weight, **how)
    grad_out = randn(*out.shape)
    grad_x = ops.conv2d_input_gradient(grad_out, weight, (9, 12), **how)
    grad_weight = ops.conv2d_weight_gradient(grad_out, x, (3, 2), **how)
    assert (grad_x.shape, grad_weight.shape) == (x.shape, weight.shape)
    for of, gradient in ((x, grad_x), (weight, grad_weight)):
        assert np.vdot(of, gradient) == pytest.approx(np.vdot(out, grad_out), rel=1e-10)
        for _ in range(3):
            step = randn(*of.shape)
            change = ops.conv2d(*((step, weight) if of is x else (x, step)), **how)
            assert np.vdot(step, gradient) == pytest.approx(np.vdot(change, grad_out), rel=1e-9, abs=1e-9)


def test_layouts(recorder: Callable[[str], Recorder]) -> None:
    x = randn(2, 5, 6, 3, dtype=F32).transpose(0, 3, 1, 2)
    grad_out = randn(2, 4, 5, 4, dtype=F32).transpose(0, 3, 1, 2)
    weight = randn(4, 3, 2, 2, dtype=F32)
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
def test_nothing(kernel: str) -> None:
    none, weight = np.zeros((0, 4, 3, 3), F32), randn(4, 2, 3, 3, dtype=F32)
    assert ops.conv2d_input_gradient(none, weight, 5, kernel=kernel).shape == (0, 2, 5, 5)
    grad_weight = np.full((4, 2, 3, 3), np.nan, F32)
    ops.conv2d_weight_gradient(none, np.zeros((0, 2, 5, 5), F32), 3, grad_weight=grad_weight, kernel=kernel)
    np.testing.assert_array_equal(grad_weight, 0)


def test_the_policy_of_convolutions_decides_and_sees_a_backward() -> None:
    grad_out, x, weight = randn(1, 2, 3, 3), randn(1, 2, 4, 4), randn(2, 2, 2, 2)
    rule = {"match": {"op": "conv", "phase": "backward"}, "use": "cpu.reference"}
    xrt.clear_decisions()
    with xrt.use_policy(xrt.Policy(kernels=xrt.KernelPolicy(conv="cpu.gemm_conv", rules=[rule]))):
        ops.conv2d(x, weight)
        ops.conv2d_input_gradient(grad_out, weight, 4)
        ops.conv2d_weight_gradient(grad_out, x, 2)
    assert [(one.op, one.chosen, one.phase) for one in xrt.decisions()] == [
        ("conv", "cpu.gemm_conv", "infer"),
        ("conv_input_gradient", "cpu.reference", "backward"),
        ("conv_weight_gradient", "cpu.reference", "backward"),
    ]


def test_a_kernel_that_cannot_is_refused_with_its_reason() -> None:
    half = randn(1, 2, 3, 3, dtype=np.float16)
    with pytest.raises(UnsupportedOperationError, match=r"OpenBLAS multiplies fp32 and fp64, and this is float16"):
        ops.conv2d_weight_gradient(half, randn(1, 2, 4, 4, dtype=np.float16), 2, kernel="cpu.gemm_conv")
    last = randn(2, 2, 2, 3).transpose(0, 3, 1, 2)
    with pytest.raises(UnsupportedOperationError, match=r"needs 'weight' with its last three dimensions contiguous"):
        ops.conv2d_input_gradient(randn(1, 2, 3, 3), last, 4, kernel="cpu.gemm_conv")


GRAD, X, WEIGHT = randn(2, 6, 3, 3, dtype=F32), randn(2, 4, 5, 5, dtype=F32), randn(6, 4, 3, 3, dtype=F32)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (lambda: ops.conv2d_input_gradient(GRAD[0], WEIGHT, 5), r"'grad_out' \[6, 3, 3\].*out_height, out_width\]"),
    "size": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT, 6), "height 6 with a kernel of 3 gives 4"),
    "width": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT, (5, 2)), "width 2 with a kernel of 3 gives nothing"),
    "no size": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT, "same"), "input_size is 'same'; expected a whole"),
    "sizes": (lambda: ops.conv2d_input_gradient(GRAD, WEIGHT, (5, 5, 5)), r"input_size is \(5, 5, 5\); expected"),
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


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_name_the_argument(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(InputError, match=said):
        call()
