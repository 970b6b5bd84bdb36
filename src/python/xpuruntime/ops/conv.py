# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Convolution."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.ops.ambient import place

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["conv2d"]


def conv2d(
    x: Any,
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
) -> Any:
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
    here = place(policy, kernel, "conv")
    pads = _integers(padding, "padding", (1, 2, 4))
    return _core.op_conv2d(
        here, x, weight, bias, out, (_integers(stride, "stride", (1, 2)) * 2)[:2], (pads * 4)[:4],
        (_integers(dilation, "dilation", (1, 2)) * 2)[:2], _integers(groups, "groups", (1,)), activation,
        phase, stream,
    )  # fmt: skip


def _integers(given: int | Sequence[int], name: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return one number, or as many as are allowed."""
    try:
        numbers = tuple(index(one) for one in given) if isinstance(given, Iterable) else (index(given),)
    except TypeError:
        numbers = ()
    if len(numbers) not in counts:
        expected = {
            (1,): "a whole number",
            (1, 2): "a whole number or two, for height and width",
            (1, 2, 4): "a whole number, (height, width), or (top, left, bottom, right)",
        }[counts]
        raise InputError(f"{name} is {given!r}; expected {expected}")
    return numbers
