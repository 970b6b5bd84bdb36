# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of attention to be measured, by a kernel of PyTorch or of xpuruntime, with the gradient where that is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention import sdpa_backends

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.pytorch.attention.call import AttentionCall

__all__ = ["call_by_backend", "call_native", "call_xrt_kernel"]


def call_native(call: AttentionCall, run: Callable[[], Tensor]) -> None:
    """Do a call by `run`, PyTorch's own choice."""
    call_by_backend(call, None, run)


def call_by_backend(call: AttentionCall, kernel: str | None, run: Callable[[], Tensor]) -> None:
    """Do a call by `run`, where PyTorch can choose nothing but one of its kernels; ``None``: what it has enabled."""

    def by_this_one() -> Tensor:
        with sdpa_backends.by_backend(kernel):
            return run()

    _with_gradient(call, by_this_one)


def call_xrt_kernel(call: AttentionCall, place: CallContext, operands: tuple[Tensor, Tensor, Tensor]) -> None:
    """Do a call by the kernel at a place; `operands` are query, key and value in four dimensions.

    Its gradient comes by way of autograd, as the native one's does: going there costs either of them the same.
    """
    _with_gradient(call, lambda: _XrtCall.apply(*operands, call, place))


def _with_gradient(call: AttentionCall, run: Callable[[], Tensor]) -> None:
    with torch.set_grad_enabled(call.needs_grad):
        out = run()
        if call.needs_grad:
            torch.autograd.grad(out, [x for x in call[:3] if x.requires_grad], torch.ones_like(out))


class _XrtCall(_private_api.SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, place: CallContext) -> Tensor:
        out = torch.empty_like(q)
        done = _core.op_attention(
            place, q, k, v, call.mask, None, out, call.needs_grad, _causal(call), call.scale, 0.0, None, None
        )
        if call.needs_grad:
            ctx.save_for_backward(q, k, v, out, done[1])
            ctx.options = (call, place)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call, place = ctx.options
        of_q, of_k, of_v = (torch.empty_like(x) for x in (q, k, v))
        _core.op_attention_backward(
            place, grads[0], q, k, v, out, lse, call.mask, None, of_q, of_k, of_v, _causal(call), call.scale, 0.0, None
        )
        return of_q, of_k, of_v, None, None


def _causal(call: AttentionCall) -> Any:
    return "top_left" if call.is_causal else False
