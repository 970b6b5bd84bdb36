# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xpuruntime.ops.conv2d` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recording_kernel import Recorder

from xpuruntime import InputError, ops

F32 = np.float32
DRAW = np.random.default_rng(4)


def randn(*shape: int) -> Any:
    return DRAW.standard_normal(shape).astype(F32)


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
    "strides": (lambda: ops.conv2d(X, WEIGHT, stride=(1, 2, 3)), r"stride is \(1, 2, 3\); expected a whole number or"),
    "no stride": (lambda: ops.conv2d(X, WEIGHT, stride=1.5), "stride is 1.5; expected a whole number"),
    "padding": (lambda: ops.conv2d(X, WEIGHT, padding=-1), "padding is .*not negative"),
    "no padding": (lambda: ops.conv2d(X, WEIGHT, padding="same"), r"padding is 'same'.*\(top, left, bottom, right\)"),
    "paddings": (lambda: ops.conv2d(X, WEIGHT, padding=(1, 2, 3)), r"padding is \(1, 2, 3\)"),
    "dilation": (lambda: ops.conv2d(X, WEIGHT, dilation=0), "dilation has 0"),
    "groups": (lambda: ops.conv2d(X, WEIGHT, groups=3), "groups is 3, which"),
    "no groups": (lambda: ops.conv2d(X, WEIGHT, groups=0), "groups has 0"),
    "two groups": (lambda: ops.conv2d(X, WEIGHT, groups=(1, 2)), r"groups is \(1, 2\); expected a whole number"),
    "huge": (lambda: ops.conv2d(X, WEIGHT, stride=2**40), "stride is"),
    "out": (lambda: ops.conv2d(X, WEIGHT, out=np.zeros((2, 6, 3, 4), F32)), r"'out'.*the result is \[2, 6, 3, 3\]"),
    "activation": (lambda: ops.conv2d(X, WEIGHT, activation="tanh"), "activation 'tanh' is not known"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_name_the_argument(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(InputError, match=said):
        call()
