# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Convolution of two dimensions and its gradients, on arrays of any library."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.ops.call_context import call_context

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["conv2d", "conv2d_input_gradient", "conv2d_weight_gradient"]

ArrayT = TypeVar("ArrayT")


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
    """Return how the kernel moves over an image, as `_core` takes it."""
    return (
        (_integers(stride, "stride", (1, 2)) * 2)[:2],
        (_integers(padding, "padding", (1, 2, 4)) * 4)[:4],
        (_integers(dilation, "dilation", (1, 2)) * 2)[:2],
        _integers(groups, "groups", (1,)),
    )


def _integers(value: Any, name: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return one number, or as many as are allowed."""
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
