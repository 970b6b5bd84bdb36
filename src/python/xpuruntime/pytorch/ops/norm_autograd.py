# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Autograd and batching rules of the operators of norms, and norms and their gradients by PyTorch's own operations.

The latter run where no kernel can serve, and where a gradient is to be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import thread_policy
from xpuruntime.pytorch.dispatch.overrides.norms import rms_eps
from xpuruntime.pytorch.ops.attention_gradient import Recorded, autograd_kernel, redispatch

if TYPE_CHECKING:
    from torch import Tensor

NO_FORWARD_MODE = (
    "forward mode (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad) is PyTorch's for its own norms alone: "
    "leave kernel= out and put the kernel into a policy, or differentiate in reverse mode"
)


def _keep_layer_norm(ctx: Any, inputs: Any, output: Any) -> None:
    input, residual, ctx.shape, weight, bias, ctx.eps, ctx.kernel, _ = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(input if residual is None else total, mean, rstd, weight, bias)
    ctx.mark_non_differentiable(mean, rstd, *([total] if residual is None else []))
    ctx.set_materialize_grads(False)


def _layer_norm_gradients(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_stats: Any) -> tuple[Any, ...]:
    summed, mean, rstd, weight, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = [needs[0] or needs[1], weight is not None and needs[3], bias is not None and needs[4]]
    if grad is None:
        gradients: Sequence[Tensor | None] = (grad_sum, None, None)
    elif torch.is_grad_enabled():
        gradients = _differentiable_gradients(grad, grad_sum, summed, ctx.shape, weight, bias, ctx.eps, rms=False)
    else:
        gradients = torch.ops.xpuruntime.layer_norm_backward(
            grad, grad_sum, summed, ctx.shape, mean, rstd, weight, bias, mask, ctx.kernel
        )
    grad_x, grad_weight, grad_bias = (
        gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)
    )
    return (
        grad_x if needs[0] else None,
        grad_x if needs[1] else None,
        None,
        grad_weight,
        grad_bias,
        None,
        None,
        None,
    )


def _keep_rms_norm(ctx: Any, inputs: Any, output: Any) -> None:
    input, residual, ctx.shape, weight, eps, ctx.kernel, _ = inputs
    _, total, rstd = output
    ctx.eps = rms_eps(input.dtype, eps)
    ctx.save_for_backward(input if residual is None else total, rstd, weight)
    ctx.mark_non_differentiable(rstd, *([total] if residual is None else []))
    ctx.set_materialize_grads(False)


def _rms_norm_gradients(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_stats: Any) -> tuple[Any, ...]:
    summed, rstd, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = [needs[0] or needs[1], weight is not None and needs[3]]
    if grad is None:
        gradients: Sequence[Tensor | None] = (grad_sum, None)
    elif torch.is_grad_enabled():
        gradients = _differentiable_gradients(grad, grad_sum, summed, ctx.shape, weight, None, ctx.eps, rms=True)[:2]
    else:
        gradients = torch.ops.xpuruntime.rms_norm_backward(
            grad, grad_sum, summed, ctx.shape, rstd, weight, mask, ctx.kernel
        )
    grad_x, grad_weight = (gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True))
    return grad_x if needs[0] else None, grad_x if needs[1] else None, None, grad_weight, None, None, None


def _batching(operator: Callable[..., Any], rows: tuple[int, ...], mask: int | None) -> Callable[..., tuple[Any, Any]]:
    """Return the rule of an operator for vmap."""
    # A batch is more rows of one call where only arguments that have rows are batched; otherwise each element of the
    # batch is a call.

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        batched = [isinstance(dim, int) for dim in in_dims]
        moved = [arg.movedim(dim, 0) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
        sums = mask is not None and any(args[mask][1:])
        if sums or any(yes and index not in rows for index, yes in enumerate(batched)):
            each = [
                operator(*(arg[i] if yes else arg for arg, yes in zip(moved, batched, strict=True)))
                for i in range(info.batch_size)
            ]
            return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0,) * len(each[0])
        for index in rows:
            arg = moved[index]
            if arg is not None and not batched[index]:
                moved[index] = arg.expand(info.batch_size, *arg.shape)
        results = tuple(operator(*moved))
        return results, tuple(None if result.shape == (0,) else 0 for result in results)

    return rule


def layer_norm(*args: Any) -> Any:
    """Call ``xpuruntime::layer_norm``, also inside the transforms of ``torch.func``."""
    if _private_api.has_transforms():
        return _LayerNorm.apply(*args)
    return torch.ops.xpuruntime.layer_norm(*args)


def rms_norm(*args: Any) -> Any:
    """Call ``xpuruntime::rms_norm``, also inside the transforms of ``torch.func``."""
    if _private_api.has_transforms():
        return _RmsNorm.apply(*args)
    return torch.ops.xpuruntime.rms_norm(*args)


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    del ctx, tangents
    raise UnsupportedOperationError(NO_FORWARD_MODE)


class _LayerNorm(torch.autograd.Function):  # type: ignore[misc] # PyTorch leaves its type open
    """For ``torch.func``, which takes no gradient that is registered with an operator."""

    forward = staticmethod(layer_norm)
    setup_context = staticmethod(_keep_layer_norm)
    backward = staticmethod(_layer_norm_gradients)
    jvp = staticmethod(_no_forward_mode)
    vmap = staticmethod(_batching(layer_norm, (0, 1), None))


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc] # PyTorch leaves its type open
    forward = staticmethod(rms_norm)
    setup_context = staticmethod(_keep_rms_norm)
    backward = staticmethod(_rms_norm_gradients)
    jvp = staticmethod(_no_forward_mode)
    vmap = staticmethod(_batching(rms_norm, (0, 1), None))


def _node(op: Any, keep: Callable[..., None], backward: Callable[..., tuple[Any, ...]]) -> type[Recorded]:
    class Node(Recorded):
        @classmethod
        def record(cls, keyset: Any, *args: Any) -> Any:
            return super().record(*args, keyset)  # last, as gradients go by position

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *stated, keyset = args
            results = redispatch(op, keyset, *stated)
            keep(ctx, stated, results)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (*backward(ctx, *grads), None)

    Node.__name__ = Node.__qualname__ = str(op).replace("::", "_").replace(".default", "").replace(".", "_")
    return Node


#: Operator to the arguments that have rows, and the one that says which gradients are wanted.
_ROWS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "layer_norm": ((0, 1), None),
    "layer_norm_backward": ((0, 1, 2, 4, 5), 8),
    "rms_norm": ((0, 1), None),
    "rms_norm_backward": ((0, 1, 2, 4), 6),
}


def register(library: torch.library.Library) -> None:
    """Make the operators differentiable, and let vmap batch them. Once."""
    for name, keep, backward in (
        ("layer_norm", _keep_layer_norm, _layer_norm_gradients),
        ("rms_norm", _keep_rms_norm, _rms_norm_gradients),
    ):
        op = getattr(torch.ops.xpuruntime, name).default
        library.impl(name, autograd_kernel(op, _node(op, keep, backward)), "Autograd", with_keyset=True)
    for name, (rows, mask) in _ROWS.items():
        rule = _batching(getattr(torch.ops.xpuruntime, name), rows, mask)
        torch.library.register_vmap(f"xpuruntime::{name}", rule, lib=library)


def torch_layer_norm(
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm, the sum, mean and rstd, by PyTorch's own kernels."""
    summed = _sum(input, residual)
    wide = _widened(summed, weight, bias)
    with thread_policy(None):
        out, mean, rstd = torch.native_layer_norm(wide, shape, _as(weight, wide), _as(bias, wide), eps)
    return out.to(input.dtype), _or_empty(summed, residual), mean, rstd


def torch_layer_norm_backward(
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
    wide = _widened(summed, weight, bias)
    with thread_policy(None):
        grads = torch.ops.aten.native_layer_norm_backward(
            _as(grad, wide), wide, shape, mean, rstd, _as(weight, wide), _as(bias, wide), mask
        )
    gradients = [None if grad is None else grad.contiguous() for grad in grads]
    gradients[0] = _as(gradients[0], summed)
    if grad_sum is not None and gradients[0] is not None:
        gradients[0] = gradients[0] + grad_sum
    return gradients[0], _as(gradients[1], weight), _as(gradients[2], bias)


def torch_rms_norm(
    input: Tensor, residual: Tensor | None, shape: Sequence[int], weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, the sum and rstd, by PyTorch's own operations."""
    summed = _sum(input, residual)
    wide = _widened(summed, weight)
    with thread_policy(None):
        out, rstd = torch.ops.aten._fused_rms_norm(wide, list(shape), _as(weight, wide), eps)
    return out.to(input.dtype).contiguous(), _or_empty(summed, residual), rstd


def torch_rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the sum and weight, as `torch_layer_norm_backward`."""
    wide = _widened(summed, weight)
    with thread_policy(None):
        grads = torch.ops.aten._fused_rms_norm_backward(
            _as(grad, wide), wide, list(shape), rstd, _as(weight, wide), list(mask)
        )
    grad_x = _as(grads[0], summed) if mask[0] else None
    if grad_sum is not None and grad_x is not None:
        grad_x = grad_x + grad_sum
    return grad_x, _as(grads[1], weight) if mask[1] else None


def _differentiable_gradients(
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


def _widened(summed: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return what is normalized in the type of wider parameters, since PyTorch's kernels take one type for all."""
    half = summed.dtype in (torch.float16, torch.bfloat16)
    wider = any(parameter is not None and parameter.dtype == torch.float32 for parameter in parameters)
    return summed.float() if half and wider else summed


def _or_empty(summed: Tensor, residual: Tensor | None) -> Tensor:
    return summed.new_empty(0) if residual is None else summed


def _as(columns: Tensor | None, like: Tensor | None) -> Tensor | None:
    return columns if columns is None or like is None or columns.dtype == like.dtype else columns.to(like.dtype)
