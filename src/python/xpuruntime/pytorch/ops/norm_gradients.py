# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Norms and their gradients by PyTorch's own operations: where no kernel can serve, and to be differentiated again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xpuruntime.pytorch.dispatch.context import thread_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["gradients", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]


def layer_norm(
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm, the sum, mean and rstd, by PyTorch's own kernels."""
    summed = _sum(input, residual)
    with thread_policy(None):
        out, mean, rstd = torch.native_layer_norm(summed, shape, _as(weight, input), _as(bias, input), eps)
    return out, _or_empty(summed, residual), mean, rstd


def layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the sum, weight and bias, by PyTorch's own kernels; ``None`` where `mask` wants none."""
    with thread_policy(None):
        grads = torch.ops.aten.native_layer_norm_backward(
            grad, summed, shape, mean, rstd, _as(weight, summed), _as(bias, summed), mask
        )
    found = [None if one is None else one.contiguous() for one in grads]
    if grad_sum is not None and found[0] is not None:
        found[0] = found[0] + grad_sum
    return found[0], _as(found[1], weight), _as(found[2], bias)


def rms_norm(
    input: Tensor, residual: Tensor | None, shape: Sequence[int], weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, the sum and rstd, by PyTorch's own operations."""
    summed = _sum(input, residual)
    with thread_policy(None):
        out, rstd = torch.ops.aten._fused_rms_norm(summed, list(shape), _as(weight, input), eps)
    return out.contiguous(), _or_empty(summed, residual), rstd


def rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the sum and weight, as `layer_norm_backward`."""
    with thread_policy(None):
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad, summed, list(shape), rstd, _as(weight, summed), list(mask)
        )
    grad_x = grads[0] if mask[0] else None
    if grad_sum is not None and grad_x is not None:
        grad_x = grad_x + grad_sum
    return grad_x, _as(grads[1], weight) if mask[1] else None


def gradients(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the sum, weight and bias, by operations that can be differentiated again."""
    wide = torch.float64 if summed.dtype == torch.float64 else torch.float32
    inner = tuple(range(summed.dim() - len(shape), summed.dim()))
    outer = tuple(range(summed.dim() - len(shape)))
    s, g = summed.to(wide), grad.to(wide)
    centred = s if rms else s - s.mean(inner, keepdim=True)
    rstd = (centred.square().mean(inner, keepdim=True) + eps).rsqrt()
    normal = centred * rstd
    scaled = g if weight is None else g * weight.to(wide)
    rest = scaled - normal * (normal * scaled).mean(inner, keepdim=True)
    if not rms:
        rest = rest - scaled.mean(inner, keepdim=True)
    grad_x = (rest * rstd).to(summed.dtype)
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    product = g * normal
    grad_weight = None if weight is None else (product.sum(outer) if outer else product).to(weight.dtype)
    grad_bias = None if bias is None else (g.sum(outer) if outer else g).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _sum(input: Tensor, residual: Tensor | None) -> Tensor:
    return input if residual is None else (input + residual).contiguous()


def _or_empty(summed: Tensor, residual: Tensor | None) -> Tensor:
    return summed.new_empty(0) if residual is None else summed


def _as(columns: Tensor | None, like: Tensor | None) -> Tensor | None:
    return columns if columns is None or like is None or columns.dtype == like.dtype else columns.to(like.dtype)
