# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The operations by their definition in float64, each with a bound for what arithmetic in a dtype may change.

Every function returns one `Expected` for each result. With ``u`` the unit roundoff of a dtype (`ROUNDOFF`: 2^-53,
2^-24, 2^-11, 2^-8 for fp64, fp32, fp16, bf16), ``u_out`` that of the result, ``u_in`` that of the inputs and ``u_acc``
that of the sums (2^-53 for fp64 inputs, else 2^-24), the bounds are

* products (matmul, convolution and its gradients): ``u_out |y| + (k + 64) u_acc (sum |a| |b| + |bias|)``, k terms a
  sum; an activation has a slope below 1.13 and adds ``16 u_acc (1 + |its argument|)``;
* products of float8 on NVIDIA GPUs before compute capability 10: their tensor cores bring the products that one
  instruction adds to the exponent of the largest and keep about 14 bits of each, and only some instructions later the
  sum goes to fp32 (what cuBLAS calls fast accumulation leaves even that out). So ``2^-12 sum |a| |b|`` more, for
  numbers among which none stands out (`FP8_SUMS`, and `Expected.fp8_sizes` for ``sum |a| |b|``);
* norms: ``u_out |y| + |w| (32 u_acc (1 + |n|) + 8 u_acc S r + 2 u_in S r (1 + |n|))`` with n the normalized value, S
  the largest of the row, r the reciprocal deviation; the last term only with a residual, as its sum may be rounded;
* attention: scores are wrong by at most ``d = (head_dim + 16) u_acc scale sum |q| |k| + 8 u_acc (|mask| + |lse|)``,
  weights relatively by ``e = 2 d + 2 u_in + (kv_length + 64) u_acc``, as they may be rounded to the inputs' dtype;
* gradients: the same errors carried through their formulas. Attention's weights and the gradients of its scores may be
  rounded to fp16 on the way, which takes whatever is below 2^-25 from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import erf, sqrt
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: Relative error of one rounding, by dtype.
ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
}
#: Digits after the point, smallest exponent of a normal number, largest number.
_FORMATS = {
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, 3.3895313892515355e38),
    "float8_e4m3fn": (3, -6, 448.0),
}
#: Below this, rounding is absolute: half of the smallest number.
_TINIEST = {"float64": 0.0, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134, "float8_e4m3fn": 2.0**-10}
#: Terms that a sum may have more than its products.
EXTRA = 64

#: Error of the sums of float8 products on GPUs that add them with about 14 bits, as a part of ``sum |a| |b|``.
FP8_SUMS = 2.0**-12


@dataclass(frozen=True)
class Expected:
    """One result."""

    name: str
    values: Array
    bound: Array
    dtype: str
    fp8_sizes: Array | None = None


def round_to(values: Array, dtype: str) -> Array:
    """Return float64 values rounded to nearest, ties to even, as `dtype` has them. Too large ones become infinite."""
    if dtype == "float64":
        return np.asarray(values, np.float64)
    if dtype in ("float32", "float16"):
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float64).astype(dtype).astype(np.float64)
    digits, smallest, largest = _FORMATS[dtype]
    values = np.asarray(values, np.float64)
    exponent = np.maximum(np.frexp(values)[1] - 1, smallest)
    rounded: Array = np.ldexp(np.rint(np.ldexp(values, digits - exponent)), exponent - digits)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)


def sums_roundoff(dtype: str) -> float:
    """Return the relative error of one rounding in the sums of products of a dtype."""
    return ROUNDOFF["float64" if dtype == "float64" else "float32"]


def expect(name: str, values: Array, error: Array, dtype: str) -> Expected:
    """Add the rounding of the result itself. What lies beyond the dtype becomes infinite."""
    values, error = np.broadcast_arrays(np.asarray(values, np.float64), np.asarray(error, np.float64))
    with np.errstate(invalid="ignore"):
        bound = error + ROUNDOFF[dtype] * (np.abs(values) + error) + _TINIEST[dtype]
    beyond = np.isinf(round_to(values, dtype)) & ~np.isnan(values)
    return Expected(name, np.where(beyond, np.copysign(np.inf, values), values), np.asarray(bound), dtype)


def _activate(values: Array, activation: str | None) -> Any:
    with np.errstate(over="ignore"):
        if activation == "relu":
            return np.where(values < 0, 0.0, values)
        if activation == "gelu":
            return 0.5 * values * (1 + np.vectorize(erf, otypes=[np.float64])(values / sqrt(2)))
        if activation == "gelu_tanh":
            return 0.5 * values * (1 + np.tanh(sqrt(2 / np.pi) * (values + 0.044715 * values**3)))
        if activation == "silu":
            return values / (1 + np.exp(-values))
    return values


def _finish(values: Array, sizes: Array, terms: int, bias: Array | None, activation: str | None, u: float) -> Any:
    if bias is not None:
        values, sizes = values + bias, sizes + np.abs(bias)
    error = (terms + EXTRA) * u * sizes
    if activation is not None:
        error = 1.13 * error + (0.0 if activation == "relu" else 16 * u * (1 + np.abs(values)))
    return _activate(values, activation), error


def matmul(
    a: Array, b: Array, bias: Array | None, activation: str | None, dtype: str, out_dtype: str, scale: float = 1.0
) -> list[Expected]:
    """Return ``activation(scale * a @ b + bias)``; `scale` is the product of the scales of float8 inputs."""
    with np.errstate(invalid="ignore"):
        values, sizes = scale * (a @ b), abs(scale) * (np.abs(a) @ np.abs(b))
        values, error = _finish(values, sizes, a.shape[-1], bias, activation, sums_roundoff(dtype))
    expected = expect("out", values, error, out_dtype)
    return [replace(expected, fp8_sizes=1.13 * sizes) if dtype.startswith("float8") else expected]


def conv2d(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    activation: str | None,
    dtype: str,
) -> list[Expected]:
    """Return the convolution by PyTorch's convention; `padding` is top, left, bottom, right."""
    top, left, bottom, right = padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    images, channels, height, width = padded.shape
    outputs, _, rows, columns = weight.shape
    out_height = (height - (rows - 1) * dilation[0] - 1) // stride[0] + 1
    out_width = (width - (columns - 1) * dilation[1] - 1) // stride[1] + 1
    split = padded.reshape(images, groups, channels // groups, height, width)
    kernel = weight.reshape(groups, outputs // groups, channels // groups, rows, columns)
    values = np.zeros((images, groups, outputs // groups, out_height, out_width))
    sizes = np.zeros_like(values)
    for i in range(rows):
        for j in range(columns):
            y, z = i * dilation[0], j * dilation[1]
            seen = split[
                ...,
                y : y + (out_height - 1) * stride[0] + 1 : stride[0],
                z : z + (out_width - 1) * stride[1] + 1 : stride[1],
            ]
            values += np.einsum("ngchw,gkc->ngkhw", seen, kernel[..., i, j])
            sizes += np.einsum("ngchw,gkc->ngkhw", np.abs(seen), np.abs(kernel[..., i, j]))
    shape = (images, outputs, out_height, out_width)
    shift = None if bias is None else bias[:, None, None]
    terms = weight[0].size if outputs else 0
    done, error = _finish(values.reshape(shape), sizes.reshape(shape), terms, shift, activation, sums_roundoff(dtype))
    return [expect("out", done, error, dtype)]


def in_precision_of(dtype: str, value: float) -> float:
    """Return a number as an operation on such arrays takes it: itself for float64, else the nearest float32."""
    return float(value if dtype == "float64" else np.float32(value))


def norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    eps: float,
    rms: bool,
    dtype: str,
) -> list[Expected]:
    """Return out, sum (with a residual), mean (of a layer norm) and rstd."""
    u, eps = sums_roundoff(dtype), in_precision_of(dtype, eps)
    s = x if residual is None else x + residual
    mean = np.zeros((*s.shape[:-1], 1)) if rms else s.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((s - mean) ** 2).mean(-1, keepdims=True) + eps)
    normal = (s - mean) * rstd
    w = np.ones(s.shape[-1]) if weight is None else weight
    values = normal * w + (0.0 if bias is None else bias)
    reach = np.abs(s).max(-1, keepdims=True, initial=0.0) * rstd
    rounded = 0.0 if residual is None else ROUNDOFF[dtype]
    relative = 32 * u * (1 + np.abs(normal)) + 8 * u * reach + 2 * rounded * reach * (1 + np.abs(normal))
    error = np.abs(w) * relative + (0.0 if bias is None else 4 * u * np.abs(bias))
    norms = [expect("out", values, error, dtype)]
    if residual is not None:
        norms.append(expect("sum", s, np.zeros_like(s), dtype))
    off = (8 * u + 2 * rounded) * reach
    if not rms:
        norms.append(expect("mean", mean[..., 0], (off / rstd)[..., 0], stats_dtype(dtype)))
    norms.append(expect("rstd", rstd[..., 0], (rstd * (32 * u + off))[..., 0], stats_dtype(dtype)))
    return norms


def stats_dtype(dtype: str) -> str:
    """Return the dtype of the mean and rstd of a norm over `dtype`."""
    return "float64" if dtype == "float64" else "float32"


def norm_backward(
    grad: Array,
    x: Array,
    mean: Array | None,
    rstd: Array,
    weight: Array | None,
    grad_sum: Array | None,
    has_bias: bool,
    dtype: str,
    weight_dtype: str,
) -> list[Expected]:
    """Return the gradients of x, weight (where there is one) and bias, from the statistics given."""
    u = sums_roundoff(dtype)
    r = rstd[..., None]
    m = np.zeros_like(r) if mean is None else mean[..., None]
    normal = (x - m) * r
    g = grad * (1.0 if weight is None else weight)
    mean_g = np.zeros_like(r) if mean is None else g.mean(-1, keepdims=True)
    mean_gx = (g * normal).mean(-1, keepdims=True)
    values = r * (g - mean_g - normal * mean_gx) + (0.0 if grad_sum is None else grad_sum)
    size_g, size_gx = np.abs(g).mean(-1, keepdims=True), np.abs(g * normal).mean(-1, keepdims=True)
    reach = 1 + np.abs(x).max(-1, keepdims=True, initial=0.0) * r
    error = r * 32 * u * reach * (np.abs(g) + size_g + (1 + np.abs(normal)) * (size_gx + size_g))
    backwards = [expect("grad_x", values, error + 4 * u * np.abs(values), dtype)]
    rows = tuple(range(x.ndim - 1))
    terms = (int(np.prod(x.shape[:-1])) + EXTRA) * u
    if weight is not None:
        sizes = (np.abs(grad) * (np.abs(normal) + reach)).sum(rows)
        backwards.append(expect("grad_weight", (grad * normal).sum(rows), terms * sizes, weight_dtype))
    if has_bias:
        backwards.append(expect("grad_bias", grad.sum(rows), terms * np.abs(grad).sum(rows), weight_dtype))
    return backwards


@dataclass(frozen=True)
class _Weights:
    """Softmax weights, their relative error, and the logarithm of the sum of exponentials."""

    values: Array
    error: Array
    score_error: Array
    lse: Array


def _spread(kv: Array, heads: int) -> Array:
    return kv if kv.shape[1] in (0, heads) else np.repeat(kv, heads // kv.shape[1], axis=1)


def _weigh(q: Array, k: Array, mask: Array | None, causal: str | None, scale: float, dtype: str) -> _Weights:
    u = sums_roundoff(dtype)
    rows, columns = q.shape[2], k.shape[2]
    scores = scale * q @ k.swapaxes(-1, -2)
    sizes = (q.shape[3] + 16) * u * abs(scale) * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    if mask is not None:
        added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask
        scores = scores + added
        sizes = sizes + 8 * u * np.where(np.isinf(added), 0.0, np.abs(added))
    if causal is not None:
        last = np.arange(rows)[:, None] + (columns - rows if causal == "bottom_right" else 0)
        scores = np.where(np.arange(columns) <= last, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    with np.errstate(divide="ignore"):
        powers = np.where(np.isinf(scores), 0.0, np.exp(scores - np.where(np.isinf(top), 0.0, top)))
        total = powers.sum(-1, keepdims=True)
        lse = np.log(total) + np.where(np.isinf(top), 0.0, top)
    finite = np.where(np.isinf(lse), 0.0, np.abs(lse))
    wrong = sizes.max(-1, keepdims=True, initial=0.0) + 8 * u * (1 + finite) + 2.0**-24 * finite * (dtype != "float64")
    error = 2 * wrong + 2 * (ROUNDOFF[dtype] if dtype in ("float16", "bfloat16") else 0.0) + (columns + EXTRA) * u
    return _Weights(powers / np.where(total == 0, 1.0, total), error, wrong[..., 0], lse[..., 0])


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    causal: str | None,
    scale: float,
    factors: Array | None,
    dtype: str,
) -> list[Expected]:
    """Return out and lse; `factors` are those of the dropout."""
    heads = q.shape[1]
    weighed = _weigh(q, _spread(k, heads), mask, causal, scale, dtype)
    weights = weighed.values if factors is None else weighed.values * factors
    values = _spread(v, heads)
    out = weights @ values
    error = weighed.error * (weights @ np.abs(values))
    lse = expect("lse", weighed.lse, weighed.score_error, "float32")
    return [expect("out", out, error, dtype), lse]


def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    causal: str | None,
    scale: float,
    factors: Array | None,
    dtype: str,
) -> list[Expected]:
    """Return the gradients of q, k and v, for an output and an lse that were rounded to their dtypes."""
    u, u_in = sums_roundoff(dtype), ROUNDOFF[dtype]
    heads = q.shape[1]
    keys, values = _spread(k, heads), _spread(v, heads)
    # float64 kernels take the lse in float32.
    weighed = _weigh(q, keys, mask, causal, scale, dtype)
    p = weighed.values
    relative = weighed.error + (2.0**-23 * (1 + np.abs(np.where(np.isinf(weighed.lse), 0, weighed.lse))))[..., None]
    f = np.ones_like(p) if factors is None else factors
    out = (p * f) @ values
    slopes = f * (grad @ values.swapaxes(-1, -2))
    mean = (grad * out).sum(-1, keepdims=True)
    size = f * (np.abs(grad) @ np.abs(values).swapaxes(-1, -2))
    of_mean = (np.abs(grad) * (p * f @ np.abs(values))).sum(-1, keepdims=True)
    narrow = dtype in ("float16", "bfloat16")
    scores = p * (slopes - mean)
    score_error = p * (
        (relative + 2 * u_in * narrow) * np.abs(slopes - mean)
        + (q.shape[3] + EXTRA) * u * size
        + (2 * u_in + weighed.error + relative) * of_mean
    )
    # What rounding to the dtype takes from the smallest, before or after they are multiplied with the scale.
    floor = np.where(p > 0, _TINIEST[dtype] if narrow else 0.0, 0.0)
    scores_floor = max(1.0, abs(scale)) * floor
    rows = (q.shape[2] + EXTRA) * u

    def gather(array: Array, kv_heads: int) -> Any:
        if kv_heads in (0, heads):
            return array
        return array.reshape(array.shape[0], kv_heads, heads // kv_heads, *array.shape[2:]).sum(2)

    grad_q = scale * scores @ keys
    error_q = abs(scale) * (score_error + (k.shape[2] + EXTRA) * u * np.abs(scores)) @ np.abs(keys)
    error_q = error_q + scores_floor @ np.abs(keys)
    grad_k = scale * scores.swapaxes(-1, -2) @ q
    error_k = abs(scale) * (score_error + rows * np.abs(scores)).swapaxes(-1, -2) @ np.abs(q)
    error_k = error_k + scores_floor.swapaxes(-1, -2) @ np.abs(q)
    grad_v = (p * f).swapaxes(-1, -2) @ grad
    error_v = (p * f * (relative + rows) + np.where(f > 0, np.maximum(f, 1) * floor, 0)).swapaxes(-1, -2) @ np.abs(grad)
    kv_heads = k.shape[1]
    return [
        expect("grad_q", grad_q, error_q, dtype),
        expect("grad_k", gather(grad_k, kv_heads), gather(error_k, kv_heads), dtype),
        expect("grad_v", gather(grad_v, kv_heads), gather(error_v, kv_heads), dtype),
    ]


class Window(NamedTuple):
    """How the kernel moves over an image; `padding` is top, left, bottom, right."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int


def input_gradient(grad_out: Array, weight: Array, size: tuple[int, int], window: Window, dtype: str) -> list[Expected]:
    """Return the gradient for x, whose height and width are `size`."""
    groups, (top, left, bottom, right) = window.groups, window.padding
    images, outputs, *out_size = grad_out.shape
    _, channels, *kernel_size = weight.shape
    arriving = grad_out.reshape(images, groups, outputs // groups, *out_size)
    kernel = weight.reshape(groups, outputs // groups, channels, *kernel_size)
    values = np.zeros((images, groups, channels, size[0] + top + bottom, size[1] + left + right))
    sizes = np.zeros_like(values)
    for (i, j), seen in _places(kernel_size, out_size, window):
        values[seen] += np.einsum("ngkhw,gkc->ngchw", arriving, kernel[..., i, j])
        sizes[seen] += np.einsum("ngkhw,gkc->ngchw", np.abs(arriving), np.abs(kernel[..., i, j]))
    inside = (..., slice(top, top + size[0]), slice(left, left + size[1]))
    shape = (images, groups * channels, *size)
    error = (outputs // groups * kernel_size[0] * kernel_size[1] + EXTRA) * sums_roundoff(dtype) * sizes[inside]
    return [expect("grad_x", values[inside].reshape(shape), error.reshape(shape), dtype)]


def weight_gradient(grad_out: Array, x: Array, size: tuple[int, int], window: Window, dtype: str) -> list[Expected]:
    """Return the gradient for a weight whose height and width are `size`."""
    groups, (top, left, bottom, right) = window.groups, window.padding
    images, outputs, *out_size = grad_out.shape
    channels = x.shape[1] // groups
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    split = padded.reshape(images, groups, channels, *padded.shape[2:])
    arriving = grad_out.reshape(images, groups, outputs // groups, *out_size)
    values = np.zeros((groups, outputs // groups, channels, *size))
    sizes = np.zeros_like(values)
    for (i, j), seen in _places(size, out_size, window):
        values[..., i, j] = np.einsum("ngkhw,ngchw->gkc", arriving, split[seen])
        sizes[..., i, j] = np.einsum("ngkhw,ngchw->gkc", np.abs(arriving), np.abs(split[seen]))
    shape = (outputs, channels, *size)
    error = (images * out_size[0] * out_size[1] + EXTRA) * sums_roundoff(dtype) * sizes
    return [expect("grad_weight", values.reshape(shape), error.reshape(shape), dtype)]


def _places(kernel_size: Any, out_size: Any, window: Window) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield each place in the kernel, with what of a padded image it meets at the pixels of the result."""
    for i in range(kernel_size[0]):
        for j in range(kernel_size[1]):
            starts = (i * window.dilation[0], j * window.dilation[1])
            yield (
                (i, j),
                (
                    ...,
                    *(
                        slice(start, start + (count - 1) * stride + 1, stride)
                        for start, count, stride in zip(starts, out_size, window.stride, strict=True)
                    ),
                ),
            )
