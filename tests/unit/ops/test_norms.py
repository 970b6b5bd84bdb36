# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer norm, RMS norm and their gradients on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recording_kernel import Recorder

from xpuruntime import InputError, ops

F32 = np.float32
DRAW = np.random.default_rng(6)
KERNELS = ["cpu.vectorised", "cpu.reference"]


def randn(*shape: int, dtype: Any = F32) -> Any:
    return DRAW.standard_normal(shape).astype(dtype)


def exact(rms: bool, x: Any, weight: Any = None, bias: Any = None) -> Any:
    x = x.astype(np.float64)
    if not rms:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + (1e-6 if rms else 1e-5))
    return x * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)


@pytest.mark.parametrize("shape", [(8,), (3, 1), (3, 33), (2, 3, 64), (2, 1, 2, 1, 2, 5), (0, 7), (2, 0, 7), (5, 5000)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x, weight, bias = randn(*shape), randn(shape[-1]), randn(shape[-1])
    out, mean, rstd = ops.layer_norm(x, weight, bias, return_stats=True)
    np.testing.assert_allclose(out, exact(False, x, weight, bias), rtol=1e-4, atol=1e-4)
    assert mean.shape == rstd.shape == shape[:-1]
    np.testing.assert_allclose(mean, x.mean(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.var(-1) + 1e-5), rtol=1e-4)
    out, rstd = ops.rms_norm(x, weight, return_stats=True)
    np.testing.assert_allclose(out, exact(True, x, weight), rtol=1e-4, atol=1e-5)
    assert rstd.shape == shape[:-1]


@pytest.mark.parametrize("columns", [4097, 3_000_001])
def test_rows_of_millions_of_columns_are_as_exact_as_short_ones(columns: int) -> None:
    # One sum in fp32 over such a row is off by more than its result rounds to.
    x = DRAW.random((1, columns), dtype=F32) + 1
    np.testing.assert_allclose(ops.layer_norm(x, kernel="cpu.vectorised"), exact(False, x), rtol=0, atol=2e-6)
    np.testing.assert_allclose(ops.rms_norm(x, kernel="cpu.vectorised"), exact(True, x), rtol=0, atol=5e-7)
    grad = DRAW.random((1, columns), dtype=F32)
    _, mean, rstd = ops.layer_norm(x, return_stats=True)
    grad_x = ops.layer_norm_backward(grad, x, mean, rstd, kernel="cpu.vectorised")[0]
    y, wide = exact(False, x), grad.astype(np.float64)
    expected = wide - wide.mean() - y * (wide * y).mean()
    expected /= np.sqrt(x.astype(np.float64).var() + 1e-5)
    np.testing.assert_allclose(grad_x, expected, rtol=0, atol=5e-6)


def test_what_comes_back() -> None:
    x, residual = randn(3, 8), randn(3, 8)
    assert isinstance(ops.layer_norm(x), np.ndarray)
    assert isinstance(ops.layer_norm(x, residual=residual), np.ndarray)
    out, total = ops.layer_norm(x, residual=residual, return_sum=True)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_allclose(out, exact(False, x + residual), rtol=1e-4, atol=1e-5)
    assert len(ops.layer_norm(x, residual=residual, return_sum=True, return_stats=True)) == 4
    assert len(ops.rms_norm(x, residual=residual, return_sum=True, return_stats=True)) == 3
    assert len(ops.rms_norm(x, return_stats=np.True_)) == 2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("columns", [3, 64, 5000])
@pytest.mark.parametrize("rms", [False, True])
def test_what_is_read_may_be_written_over(rms: bool, columns: int, kernel: str) -> None:
    function = ops.rms_norm if rms else ops.layer_norm
    x, residual, weight = randn(5, columns), randn(5, columns), randn(columns)
    out, total = function(x, weight, residual=residual, return_sum=True, kernel=kernel)
    for out_is, sum_is in (("x", "residual"), ("residual", "x"), ("x", None), (None, "x"), ("residual", None)):
        given = {"x": x.copy(), "residual": residual.copy(), None: None}
        got = function(
            given["x"], weight, residual=given["residual"], return_sum=True, out=given[out_is], sum_out=given[sum_is],
            kernel=kernel,
        )  # fmt: skip
        np.testing.assert_array_equal(got[0], out, err_msg=f"out is {out_is}, sum_out is {sum_is}")
        np.testing.assert_array_equal(got[1], total, err_msg=f"out is {out_is}, sum_out is {sum_is}")
    alone = function(x, weight, kernel=kernel)
    assert function(x, weight, out=x, kernel=kernel) is x
    np.testing.assert_array_equal(x, alone)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("columns", [3, 64, 5000])
def test_gradients_may_be_written_over_what_is_read(columns: int, kernel: str) -> None:
    randn_by_name = {name: randn(6, columns) for name in ("grad_out", "x", "grad_sum")}
    weight = randn(columns)
    _, mean, rstd = ops.layer_norm(randn_by_name["x"], weight, return_stats=True)
    want = ops.layer_norm_backward(**randn_by_name, mean=mean, rstd=rstd, weight=weight, has_bias=True, kernel=kernel)
    for name in randn_by_name:
        copies = {key: value.copy() for key, value in randn_by_name.items()}
        got = ops.layer_norm_backward(
            **copies, mean=mean, rstd=rstd, weight=weight, has_bias=True, grad_x=copies[name], kernel=kernel
        )
        assert got[0] is copies[name]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"grad_x is {name}")


def test_parts_of_arrays_are_not_copied(recorder: Callable[[str], Recorder]) -> None:
    kernel = recorder("layer_norm")
    x, residual = randn(2, 3, 20)[..., 4:12], np.broadcast_to(randn(8), (2, 3, 8))
    out = np.zeros((6, 9), F32)[:, :8].reshape(2, 3, 8)
    ops.layer_norm(x, residual=residual, return_stats=True, kernel=kernel.id)
    assert kernel.seen["x"] == ((6, 8), (20, 1), x.ctypes.data)
    assert kernel.seen["residual"] == ((6, 8), (0, 1), residual.ctypes.data)
    assert kernel.seen["y"][:2] == ((6, 8), (8, 1))
    assert kernel.seen["mean"][:2] == ((6,), (1,))
    assert out.shape == x.shape
    with pytest.raises(InputError, match=r"'x' \[3, 2, 8\].*cannot be joined without a copy"):
        ops.layer_norm(randn(2, 3, 8).transpose(1, 0, 2))


def differences(function: Callable[[Any], Any], x: Any, weights: Any) -> Any:
    gradient = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        values = []
        for step in (1e-5, -1e-5):
            moved = x.copy()
            moved[at] += step
            values.append((weights * function(moved)).sum())
        gradient[at] = (values[0] - values[1]) / 2e-5
    return gradient


@pytest.mark.parametrize("rms", [False, True])
def test_gradients_by_differences(rms: bool) -> None:
    x, weight, bias, grad_out, grad_sum = (randn(*s, dtype=np.float64) for s in ((3, 6), (6,), (6,), (3, 6), (3, 6)))
    want_x = differences(lambda v: exact(rms, v, weight, bias), x, grad_out) + grad_sum
    want_weight = differences(lambda v: exact(rms, x, v, bias), weight, grad_out)
    if rms:
        _, rstd = ops.rms_norm(x, weight, return_stats=True)
        grad_x, grad_weight = ops.rms_norm_backward(grad_out, x, rstd, weight, grad_sum=grad_sum)
    else:
        _, mean, rstd = ops.layer_norm(x, weight, bias, return_stats=True)
        grad_x, grad_weight, grad_bias = ops.layer_norm_backward(
            grad_out, x, mean, rstd, weight, has_bias=True, grad_sum=grad_sum
        )
        np.testing.assert_allclose(grad_bias, grad_out.sum(0), rtol=1e-5)
    np.testing.assert_allclose(grad_x, want_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grad_weight, want_weight, rtol=1e-4, atol=1e-5)


def test_gradients_that_there_are_not() -> None:
    x = randn(3, 6)
    _, mean, rstd = ops.layer_norm(x, return_stats=True)
    grad_x, grad_weight, grad_bias = ops.layer_norm_backward(x, x, mean, rstd)
    assert (grad_x.shape, grad_weight, grad_bias) == (x.shape, None, None)
    _, none, grad_bias = ops.layer_norm_backward(x, x, mean, rstd, has_bias=True)
    assert none is None
    np.testing.assert_allclose(grad_bias, x.sum(0), rtol=1e-5, atol=1e-6)
    assert ops.rms_norm_backward(x, x, rstd)[1] is None


def test_gradients_of_no_rows_are_zero() -> None:
    x, weight = randn(0, 6), randn(6)
    _, mean, rstd = ops.layer_norm(x, weight, return_stats=True)
    grad_x, grad_weight, grad_bias = ops.layer_norm_backward(x, x, mean, rstd, weight, has_bias=True)
    assert grad_x.shape == (0, 6)
    np.testing.assert_array_equal(grad_weight, np.zeros(6))
    np.testing.assert_array_equal(grad_bias, np.zeros(6))


X, W = randn(3, 8), randn(8)
ROWS = randn(3)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "scalar": (lambda: ops.layer_norm(np.array(1.0, F32)), r"'x' \[\].*0 dimensions; expected \[.., columns\]"),
    "columns": (lambda: ops.layer_norm(randn(3, 0)), r"'x' \[3, 0\].*has no columns to normalize over"),
    "integers": (lambda: ops.rms_norm(np.ones((3, 8), int)), "'x'.*a dtype that is not normalized here"),
    "weight": (lambda: ops.layer_norm(X, randn(7)), r"'weight' \[7\].*must be \[8\], one for each column of 'x'"),
    "weight dtype": (lambda: ops.layer_norm(X, np.ones(8)), "'weight'.*must be float32"),
    "bias dtype": (
        lambda: ops.layer_norm(X.astype(np.float16), W.astype(np.float16), W),
        "'bias'.*another dtype than 'weight'",
    ),
    "residual": (lambda: ops.layer_norm(X, residual=randn(2, 8)), r"'residual' \[2, 8\].*another shape than 'x'"),
    "residual dtype": (lambda: ops.layer_norm(X, residual=X.astype(np.float64)), "'residual'.*another dtype than 'x'"),
    "eps": (lambda: ops.layer_norm(X, eps=-1), "eps is -1.0.*not negative"),
    "sum of nothing": (lambda: ops.layer_norm(X, return_sum=True), "the sum is asked for without 'residual'"),
    "out": (lambda: ops.rms_norm(X, out=np.zeros((8, 3), F32)), r"'out'.*the result is \[3, 8\]"),
    "out within x": (lambda: ops.rms_norm(X[:2], out=X[1:]), "'out'.*shares memory with 'x'"),
    "out is the weight": (lambda: ops.rms_norm(W[None], W, out=W[None]), "'out'.*shares memory with 'weight'"),
    "one for two": (
        lambda: ops.rms_norm(X, residual=X, return_sum=True, out=(zeros_like := np.zeros_like(X)), sum_out=zeros_like),
        "'sum_out'.*shares memory with the result 'out'",
    ),
    "rstd": (lambda: ops.rms_norm_backward(X, X, ROWS.astype(np.float64)), "'rstd'.*must be float32 in the shape"),
    "no rstd": (lambda: ops.rms_norm_backward(X, X, None), "the argument 'rstd' is missing"),
    "no mean": (lambda: ops.layer_norm_backward(X, X, None, ROWS), "the argument 'mean' is missing"),
    "grad_out": (lambda: ops.rms_norm_backward(X[:2], X, ROWS), "'grad_out'.*another shape than 'x'"),
    "grad_sum": (lambda: ops.rms_norm_backward(X, X, ROWS, grad_sum=X[:1]), "'grad_sum'.*another shape than 'x'"),
    "grad_x": (lambda: ops.rms_norm_backward(X, X, ROWS, grad_x=ROWS), "'grad_x'.*wrong shape"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_name_the_argument(what: str) -> None:
    call, said = BAD[what]
    before = X.copy(), W.copy()
    with pytest.raises(InputError, match=said):
        call()
    np.testing.assert_array_equal(X, before[0])
    np.testing.assert_array_equal(W, before[1])
