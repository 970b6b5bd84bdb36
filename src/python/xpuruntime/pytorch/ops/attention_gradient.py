# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The gradients of ``xpuruntime::attention``, also of its gradient, and both under the transforms of ``torch.func``."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.pytorch.held import current
from xpuruntime.pytorch.ops import attention_operator as operator
from xpuruntime.pytorch.ops.attention_operator import LIBRARY, by_torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention"]

_forward_op = torch.ops.xpuruntime.attention.default
_backward_op = torch.ops.xpuruntime.attention_backward.default
_transforming = torch._C._are_functorch_transforms_active


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, rng, dropout_p, is_causal, scale, kernel, want_lse, _, module = inputs
    operator.check(want_lse)
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, mask, rng)
    ctx.options = (dropout_p, is_causal, scale, kernel, module)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Any) -> tuple[Any, ...]:
    del grad_lse
    if grad_out is None:
        return (None,) * 12
    query, key, value, out, lse, mask, rng = ctx.saved_tensors
    run = _Gradient.apply if _transforming() else _backward_op
    gradients = run(grad_out, query, key, value, out, lse, mask, rng, *ctx.options)
    wanted = [gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return (*wanted, *(None,) * 9)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    grad_out, query, key, value, _, _, mask, _, dropout_p, is_causal, scale, kernel, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_out, query, key, value, mask)
    ctx.options = (dropout_p, is_causal, scale, kernel)


def _backward_again(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Return the gradient of the gradient, by differentiating PyTorch's unfused attention twice."""
    saved = ctx.saved_tensors
    mask = saved[4]
    dropout_p, is_causal, scale, kernel = ctx.options
    _say_that_math_serves(dropout_p, kernel)
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        operands = [x if further and x.requires_grad else x.detach().requires_grad_() for x in saved[:4]]
        grad_out, *inputs = operands
        out = by_torch("torch.math", *inputs, mask, 0.0, is_causal, scale)  # type: ignore[call-arg, arg-type]
        first = torch.autograd.grad(out, inputs, grad_out, create_graph=True)
        given = [(gradient, grad) for gradient, grad in zip(first, grads, strict=True) if grad is not None]
        if not given:
            return (None,) * 13
        second = torch.autograd.grad(
            [one for one, _ in given], operands, [grad for _, grad in given], create_graph=further, allow_unused=True
        )
    return (*second, *(None,) * 9)


_said: set[int] = set()


def _say_that_math_serves(dropout_p: float, kernel: str) -> None:
    held = current()
    if dropout_p > 0:
        msg = (
            "the gradient of the gradient of attention with dropout is nowhere to be had: none of our kernels has it, and"
            " PyTorch's draw other random numbers. Fix: leave dropout out, or ask for torch.math from the start"
        )
        raise UnsupportedOperationError(msg, engine="torch")
    if kernel or (held is not None and held.strict and "attention" in held.ops):
        msg = (
            "the gradient of the gradient of attention has no kernel but torch.math, which the policy or the call does not"
            " ask for. Fix: ask for torch.math where gradients are differentiated again, or use mode: prefer"
        )
        raise UnsupportedOperationError(msg, engine="torch")
    number = 0 if held is None else held.number
    if number not in _said:
        _said.add(number)
        msg = (
            "the gradient of the gradient of attention runs by torch.math, whatever the policy asks for: no other kernel"
            " has it"
        )
        warnings.warn(msg, XpuRuntimeWarning, stacklevel=2)


torch.library.register_autograd("xpuruntime::attention", _backward, setup_context=_keep_forward, lib=LIBRARY)
torch.library.register_autograd(
    "xpuruntime::attention_backward", _backward_again, setup_context=_keep_backward, lib=LIBRARY
)


def _folded(info: Any, in_dims: tuple[Any, ...], tensors: tuple[Any, ...], mask_at: int, rng_at: int) -> list[Any]:
    """Return the tensors of a call under ``vmap`` with the mapped dimension folded into the batch."""
    n = info.batch_size
    assert in_dims[rng_at] is None, "a call with dropout is not mapped"
    folded: list[Any] = []
    for number, (tensor, dim) in enumerate(zip(tensors, in_dims, strict=False)):
        if tensor is None or number == rng_at:
            folded.append(tensor)
            continue
        x = tensor
        if number == mask_at:
            if dim is None and (x.dim() < 4 or x.shape[0] == 1):
                folded.append(x)  # it broadcasts over the batch
                continue
            x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
            while x.dim() < 5:
                x = x.unsqueeze(1)
            first, at = tensors[0], in_dims[0]
            batch = first.shape[0] if at is None else first.movedim(at, 0).shape[1]
            folded.append(x.expand(n, batch, *x.shape[2:]).flatten(0, 1))
            continue
        x = x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(x.flatten(0, 1))
    return folded


class _Attention(torch.autograd.Function):
    """``xpuruntime::attention`` for the transforms of ``torch.func``, which do not take it as an operator."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward_op(*args)

    setup_context = staticmethod(_keep_forward)  # type: ignore[assignment]
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        folded = _folded(info, in_dims, args[:5], 3, 4)
        out, lse = _Attention.apply(*folded, *args[5:])  # type: ignore[no-untyped-call]
        n = info.batch_size
        lse = lse.unflatten(0, (n, -1)) if args[9] else lse.unsqueeze(0).expand(n, 0)
        return (out.unflatten(0, (n, -1)), lse), (0, 0)


class _Gradient(torch.autograd.Function):
    """``xpuruntime::attention_backward`` likewise."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _backward_op(*args)

    setup_context = staticmethod(_keep_backward)  # type: ignore[assignment]
    backward = staticmethod(_backward_again)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        folded = _folded(info, in_dims, args[:8], 6, 7)
        gradients = _Gradient.apply(*folded, *args[8:])  # type: ignore[no-untyped-call]
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in gradients), (0, 0, 0)


def attention(*args: Any) -> tuple[Tensor, Tensor]:
    """Call ``xpuruntime::attention``, all arguments by place, in the way that the transforms in force can take."""
    if _transforming():
        return _Attention.apply(*args)  # type: ignore[no-untyped-call, no-any-return]
    return _forward_op(*args)  # type: ignore[no-any-return]
