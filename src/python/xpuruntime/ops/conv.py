# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Convolution."""

from __future__ import annotations

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
        As for `matmul`; the policy's key is ``conv``. The stride of the convolution is `stride`.
    stream
        The CUDA stream.

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
    pads = (padding,) if isinstance(padding, int) else tuple(padding)
    if len(pads) not in (1, 2, 4):
        msg = f"padding has {len(pads)} numbers; expected one, (height, width), or (top, left, bottom, right)"
        raise InputError(msg)
    return _core.op_conv2d(
        here.site, x, weight, bias, out, _pair(stride), (pads * 4)[:4], _pair(dilation), (groups,), activation,
        here.allow_tf32, here.deterministic, phase, stream,
    )  # fmt: skip


def _pair(value: int | Sequence[int]) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else value
