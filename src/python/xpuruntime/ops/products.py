# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Products of matrices, convolution of two dimensions and its gradients, on arrays of any library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, TypeVar, overload

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.ops.call_context import ambient_context, call_context

ArrayT = TypeVar("ArrayT")
_op_matmul = _core.op_matmul


@overload
def matmul(
    a: ArrayT,
    b: Any,
    bias: Any = ...,
    activation: str | None = ...,
    out: Any = ...,
    *,
    scale_a: Any = ...,
    scale_b: Any = ...,
    out_dtype: None = ...,
    kernel: str | Sequence[str] | None = ...,
    policy: Any = ...,
    stream: Any = ...,
    phase: str | None = ...,
) -> ArrayT: ...
@overload
def matmul(
    a: Any,
    b: Any,
    bias: Any = ...,
    activation: str | None = ...,
    out: Any = ...,
    *,
    scale_a: Any = ...,
    scale_b: Any = ...,
    out_dtype: str,
    kernel: str | Sequence[str] | None = ...,
    policy: Any = ...,
    stream: Any = ...,
    phase: str | None = ...,
) -> Any: ...
def matmul(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    *,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: str | None = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
    phase: str | None = None,
) -> Any:
    """Return ``activation(a @ b + bias)``.

    Parameters
    ----------
    a : array [.., m, k]
        float64, float32, float16, bfloat16 or float8_e4m3fn. Any strides: a transposed view is not copied.
    b : array [.., k, n]
        Of the same dtype. Leading dimensions are batches, and broadcast as a whole.
    bias : array [n], optional
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
        ``"gelu"`` is the one by the error function.
    out : array [.., m, n], optional
        Where to write. It may not share memory with the inputs.
    scale_a, scale_b : float32 array of one element, optional
        Factors of float8 inputs.
    out_dtype : str, optional
        ``"float32"`` for 16-bit inputs; for float8 inputs also ``"float16"``, and bfloat16 where nothing is stated.
    kernel : str or sequence of str, optional
        The kernel to run, by id such as ``"cublas.cublasLt"`` or by family, or several in order of preference. What
        cannot serve is refused, whatever the policy's mode.
    policy : Policy, KernelPolicy, path or dict, optional
        Instead of the ambient policy.
    stream : Stream, stream of another library, or int, optional
        On CUDA. Default: the current stream of the library of the arrays, or the device's default stream. With another
        stream than its library's current one, both are ordered before and after the call.
    phase : {"infer", "train", "backward"}, optional
        For rules by phase; default ``"infer"``.

    Returns
    -------
    array [.., m, n]
        Of the library of `a`, or `out`. On CUDA it is complete in the order of the stream.

    Raises
    ------
    InputError
        Names the argument whose shape, dtype, device or strides do not fit.
    UnsupportedOperationError
        No kernel can serve the call, or not the one that is asked for: names every candidate and its reason.
    PolicyError
        The policy or the kernel is none.
    """
    here = ambient_context() if policy is None and kernel is None else call_context(policy, kernel, "matmul")
    return _op_matmul(
        here, a, b, bias, scale_a, scale_b, out, activation, out_dtype, phase, stream,
    )  # fmt: skip


def conv2d(
    x: ArrayT,
    weight: Any,
    bias: Any = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    out: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
    phase: str | None = None,
) -> ArrayT:
    """Return ``activation(x convolved with weight + bias)``, by PyTorch's convention: the kernel is not flipped.

    Parameters
    ----------
    x : array [batch, channels, height, width]
        float64, float32, float16 or bfloat16. Channels first or last in memory, by its strides.
    weight : array [out_channels, channels / groups, kernel_height, kernel_width]
    bias : array [out_channels], optional
    stride, dilation : int or (int, int)
        For height and width.
    padding : int, (height, width), or (top, left, bottom, right)
        Zeros around `x`.
    groups : int
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
    out : array, optional
        Where to write.
    kernel, policy, stream, phase
        As for `matmul`; the key of a policy is ``conv``.

    Returns
    -------
    array [batch, out_channels, out_height, out_width]
        Channels last in memory where `x` is.

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    here = call_context(policy, kernel, "conv")
    result: ArrayT = _core.op_conv2d(
        here, x, weight, bias, out, *_window(stride, padding, dilation, groups), activation, phase, stream
    )
    return result


def conv2d_input_gradient(
    grad_out: ArrayT,
    weight: Any,
    input_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    grad_x: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
) -> ArrayT:
    """Return the gradient of `conv2d` for x.

    Parameters
    ----------
    grad_out : array [batch, out_channels, out_height, out_width]
        Gradient that arrives at the output; of an activation, take its gradient first.
    weight, stride, padding, dilation, groups
        What the forward was given.
    input_size : int or (int, int)
        Height and width of x, which the other shapes leave open where the stride is not 1.
    grad_x : array, optional
        Where to write.
    kernel, policy, stream
        As for `matmul`; the key of a policy is ``conv``, and rules see the phase ``"backward"``.

    Returns
    -------
    array [batch, channels, height, width]
        Channels last in memory where `grad_out` is.

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    here = call_context(policy, kernel, "conv")
    result: ArrayT = _core.op_conv2d_input_gradient(
        here, grad_out, weight, grad_x, (_integers(input_size, "input_size", (1, 2)) * 2)[:2],
        *_window(stride, padding, dilation, groups), stream,
    )  # fmt: skip
    return result


def conv2d_weight_gradient(
    grad_out: ArrayT,
    x: Any,
    kernel_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    grad_weight: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
) -> ArrayT:
    """Return the gradient of `conv2d` for weight.

    That for the bias needs no kernel: it is the sum of `grad_out` over all dimensions but the second.

    Parameters
    ----------
    grad_out : array [batch, out_channels, out_height, out_width]
        Gradient that arrives at the output; of an activation, take its gradient first.
    x, stride, padding, dilation, groups
        What the forward was given.
    kernel_size : int or (int, int)
        Height and width of the kernel.
    grad_weight : array, optional
        Where to write.
    kernel, policy, stream
        As for `matmul`; the key of a policy is ``conv``, and rules see the phase ``"backward"``.

    Returns
    -------
    array [out_channels, channels / groups, kernel_height, kernel_width]
        Channels last in memory where `x` is.

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    here = call_context(policy, kernel, "conv")
    result: ArrayT = _core.op_conv2d_weight_gradient(
        here, grad_out, x, grad_weight, (_integers(kernel_size, "kernel_size", (1, 2)) * 2)[:2],
        *_window(stride, padding, dilation, groups), stream,
    )  # fmt: skip
    return result


def _window(
    stride: int | Sequence[int], padding: int | Sequence[int], dilation: int | Sequence[int], groups: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (
        (_integers(stride, "stride", (1, 2)) * 2)[:2],
        (_integers(padding, "padding", (1, 2, 4)) * 4)[:4],
        (_integers(dilation, "dilation", (1, 2)) * 2)[:2],
        _integers(groups, "groups", (1,)),
    )


def _integers(value: Any, name: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    try:
        if isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0:
            numbers = () if isinstance(value, (bytes, bytearray)) else tuple(index(part) for part in value)
        else:
            numbers = (index(value),)
    except TypeError:
        numbers = ()
    if len(numbers) not in counts:
        expected = {
            (1,): "a whole number",
            (1, 2): "a whole number or two, for height and width",
            (1, 2, 4): "a whole number, (height, width), or (top, left, bottom, right)",
        }[counts]
        raise InputError(f"{name} is {value!r}. Fix: give {expected}")
    return numbers
