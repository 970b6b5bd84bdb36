# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arguments of PyTorch's convolutions: consistency, support by xpuruntime's kernels, memory layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["ConvWindow", "fits", "is_fixed", "layout_of", "rounds", "unsupported_reason", "window_of"]

_deterministic = _private_api.is_deterministic
_fp32_precision = _private_api.fp32_precision


class ConvWindow(NamedTuple):
    """How the kernel moves over an image, as `_core` takes it."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: tuple[int]


def window_of(
    dims: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> ConvWindow:
    """Return the window of a convolution whose operands have `dims` dimensions: 4, or 3 for images of one row."""
    if dims == 4:
        (sh, sw), (ph, pw), (dh, dw) = _pair(stride), _pair(padding), _pair(dilation)
    else:
        (sh, sw), (ph, pw), (dh, dw) = (1, stride[0]), (0, padding[0]), (1, dilation[0])
    return ConvWindow((sh, sw), (ph, pw, ph, pw), (dh, dw), (groups,))


def rounds(x: Tensor) -> bool:
    """Say whether PyTorch's switches let a convolution of `x` round its inputs to TF32."""
    return x.dtype is torch.float32 and x.device.type == "cuda" and _fp32_precision("cuda", "conv") == "tf32"


def is_fixed(x: Tensor) -> bool:
    """Say whether PyTorch's switches ask a convolution of `x` for the same bits in every run."""
    return bool(_deterministic()) or (x.device.type == "cuda" and torch.backends.cudnn.deterministic)


def unsupported_reason(x: Tensor, weight: Tensor, transposed: bool) -> str:
    """Return why no xpuruntime kernel can serve, or nothing."""
    if transposed:
        return "this library has no kernel for a transposed convolution"
    if x.dim() not in (3, 4):
        return f"kernels of this library convolve in one and two dimensions, and this has {x.dim() - 2}"
    if x.is_complex() or not x.is_floating_point():
        return f"kernels of this library convolve floating point numbers, and this is {x.dtype}"
    if weight.is_mkldnn:
        return "the weight is in a layout of oneDNN's own"
    return ""


def fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, groups: int,
) -> bool:  # fmt: skip
    """Say whether there is something to compute; PyTorch says itself where arguments do not fit."""
    if x.dim() < 3 or x.dim() != weight.dim() or x.numel() == 0 or weight.numel() == 0:
        return False
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (
        x.dtype == weight.dtype
        and x.device == weight.device
        and (bias is None or (tuple(bias.shape), bias.dtype, bias.device) == ((channels,), x.dtype, x.device))
        and all(len(numbers) in (1, x.dim() - 2) for numbers in (stride, padding, dilation))
        and min(*stride, *dilation, *(one + 1 for one in padding)) > 0
    )


def layout_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, bias_shape: Sequence[int] | None, *rest: Any
) -> torch.memory_format:
    """Return the memory format in which PyTorch would convolve these, and give the result and the gradients.

    `rest` is stride, padding, dilation, whether it is transposed, output padding and groups.
    """
    if _is_plain(x) and _is_plain(weight):
        return torch.contiguous_format
    backend = _private_api.conv_backend(x, weight, bias, *rest, None if bias_shape is None else list(bias_shape))
    found: torch.memory_format = _private_api.conv_memory_format(x, weight, backend)
    return found


def _is_plain(x: Tensor) -> bool:
    """Say whether it is contiguous and nothing else: one channel, or one pixel, can be channels last as well."""
    return x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
