# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arguments of attention that no kernel of xpuruntime takes; PyTorch serves such calls itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.selection import four
from xpuruntime.pytorch.dispatch import context

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.attention.call import AttentionCall

_KIND = _private_api.transform_kinds


def transforms_and_tangents(tensors: tuple[Tensor | None, ...] = ()) -> tuple[Any, ...]:
    """Return the transforms of ``torch.func`` active, outermost first, and which tensors have forward derivatives."""
    stack = context.transforms()
    level = _private_api.forward_level()
    if not stack and level < 0:
        return ()
    return (level, *(context.has_tangent(x) for x in tensors if level >= 0), *(entry.key() for entry in stack))


def xrt_call_rejection(call: AttentionCall) -> str:
    """Return why no xpuruntime kernel can take a call, a sentence; empty where one might."""
    tensors = (call.q, call.k, call.v)
    return _reason_by_kind(call, tensors) or _reason_by_transform(call, tensors) or _reason_by_shape(call, tensors)


def _reason_by_kind(call: AttentionCall, tensors: tuple[Tensor, ...]) -> str:
    for x in (*tensors, *(() if call.mask is None else (call.mask,))):
        if x.is_nested:
            return "nested tensors are PyTorch's own"
        if x.layout is not torch.strided:
            return f"a tensor with the layout {x.layout} is PyTorch's own"
        if _private_api.is_wrapper(x):
            return f"a {type(x).__name__} wraps other tensors, which only PyTorch can take apart"
        if x.device.type not in ("cpu", "cuda", "meta"):
            return f"the tensors are on {x.device}, and xpuruntime kernels run on cpu and cuda"
    if call.mask is not None and call.mask.requires_grad and torch.is_grad_enabled():
        return "attn_mask requires a gradient, which xpuruntime kernels do not compute"
    if call.mask is not None and call.is_causal:
        return "whether is_causal beside attn_mask is allowed is PyTorch's to say"
    if call.dropout_p >= 1:
        return "dropout_p is 1, and xpuruntime kernels take less than that"
    return ""


def _reason_by_transform(call: AttentionCall, tensors: tuple[Tensor, ...]) -> str:
    kinds = [transform.key() for transform in context.transforms()]
    if _KIND.Jvp in kinds:
        return "xpuruntime kernels have no forward-mode derivative"
    if _private_api.forward_level() >= 0 and any(context.has_tangent(x) for x in (*tensors, call.mask)):
        return "xpuruntime kernels have no forward-mode derivative"
    if kinds.count(_KIND.Grad) > 1:
        return "a gradient of a gradient by torch.func needs one that PyTorch can differentiate again"
    if _KIND.Vmap in kinds and call.dropout_p > 0:
        return "under vmap, what randomness=... asks of the dropout is PyTorch's to do"
    return ""


def _reason_by_shape(call: AttentionCall, tensors: tuple[Tensor, ...]) -> str:
    q, k, v = tensors
    if q.dim() < 2 or q.dim() != k.dim() or q.dim() != v.dim():
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions"
    if q.shape[:-3] != k.shape[:-3] or q.shape[:-3] != v.shape[:-3]:
        return "q, k and v have different batches, which PyTorch broadcasts"
    if q.dim() > 2:
        if k.shape[-3] != v.shape[-3]:
            return "k and v have different numbers of heads"
        if q.shape[-3] != k.shape[-3] and not call.enable_gqa:
            return "q and k have different numbers of heads, without enable_gqa=True"
    if q.shape[-1] == 0:
        return "head_dim is 0"
    if v.shape[-1] != q.shape[-1]:
        return f"v has a head_dim of {v.shape[-1]} and q one of {q.shape[-1]}"
    mask = call.mask
    if mask is not None:
        if mask.dim() < 2:
            return f"attn_mask has {mask.dim()} dimensions, and xpuruntime kernels take one with rows and columns"
        if mask.dim() > 4 or (q.dim() > 4 and mask.dim() == 4 and mask.shape[0] != 1):
            return f"attn_mask has {mask.dim()} dimensions and q {q.dim()}: xpuruntime kernels take one for the batch"
        if q.dim() == 2 and mask.dim() > 2:
            return "attn_mask has more dimensions than q"
    if q.dim() > 4:
        try:
            for x in tensors:
                four(x)
        except RuntimeError:
            return "the batch dimensions cannot be viewed as one without a copy"
    return ""
