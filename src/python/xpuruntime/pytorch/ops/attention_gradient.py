# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gradients of ``xpuruntime::attention``, also of its gradient, and both under the transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import UnsupportedOperationError, warn
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.ops import attention_operator as operator
from xpuruntime.pytorch.ops.attention_operator import LIBRARY, by_torch

if TYPE_CHECKING:
    from torch import Tensor

_forward_op = torch.ops.xpuruntime.attention.default
_backward_op = torch.ops.xpuruntime.attention_backward.default


#: Whether a tensor is mapped by ``is_grads_batched=True``, which is no transform of ``torch.func``.
_mapped = _private_api.is_legacy_batched

_is_functional = _private_api.is_functional


def is_watched() -> bool:
    """Say whether modes or transforms of PyTorch want to see the operators."""
    return bool(_private_api.dispatch_modes() > 0 or _private_api.has_transforms())


def is_put_off(tensors: Sequence[Tensor | None]) -> bool:
    """Say whether the memory of a tensor does not hold its numbers.

    PyTorch negates later, keeps no zeros, and wraps what it traces without changes in place. The dispatcher sees to
    that before it calls a kernel.
    """
    return any(x is not None and (x.is_neg() or _private_api.is_zero_tensor(x) or _is_functional(x)) for x in tensors)


def attention(*args: Any) -> tuple[Tensor, Tensor | None]:
    """Call ``xpuruntime::attention`` on tensors that are nothing but tensors, where no mode and no transform looks on.

    All arguments by place. What the operator would do, without the dispatcher, which costs more than the rest.
    """
    results: tuple[Tensor, Tensor | None]
    if is_put_off(args[:4]):
        results = _forward_op(*args)
        return results
    if args[9]:
        results = _Attention.record(None, *args)
        return results
    return operator.run_forward(*args)


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
    # Where nothing looks on, without a detour through the dispatcher.
    plain = not (torch.is_grad_enabled() or type(grad_out) is not torch.Tensor or _mapped(grad_out) or is_watched())
    plain = plain and not is_put_off((grad_out, query, key, value, mask))
    run = operator.run_backward if plain else _backward_op
    gradients = run(grad_out, query, key, value, out, lse, mask, rng, *ctx.options)
    return (*gradients, *(None,) * 9)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    grad_out, query, key, value, _, _, mask, _, dropout_p, is_causal, scale, kernel, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_out, query, key, value, mask)
    ctx.options = (dropout_p, is_causal, scale, kernel)


def _backward_again(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    mask = saved[4]
    dropout_p, is_causal, scale, kernel = ctx.options
    _warn_math_kernel(dropout_p, kernel)
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        operands = [x if further and x.requires_grad else x.detach().requires_grad_() for x in saved[:4]]
        grad_out, *inputs = operands
        out = by_torch("torch.math", *inputs, mask, 0.0, is_causal, scale)  # type: ignore[call-arg]
        first = torch.autograd.grad(out, inputs, grad_out, create_graph=True)
        outputs_and_grads = [(gradient, grad) for gradient, grad in zip(first, grads, strict=True) if grad is not None]
        if not outputs_and_grads:
            return (None,) * 13
        second = torch.autograd.grad(
            [output for output, _ in outputs_and_grads],
            operands,
            [grad for _, grad in outputs_and_grads],
            create_graph=further,
            allow_unused=True,
        )
    return (*second, *(None,) * 9)


_said: set[int] = set()


def _warn_math_kernel(dropout_p: float, kernel: str) -> None:
    active = active_policy()
    if dropout_p > 0:
        msg = (
            "the gradient of the gradient of attention with dropout is nowhere to be had: no xpuruntime kernel has it,"
            " and PyTorch's draw other random numbers. Fix: leave dropout out, or ask for torch.math from the start"
        )
        raise UnsupportedOperationError(msg, engine="torch")
    if (kernel and not kernel.endswith("?")) or (active is not None and active.strict and "attention" in active.ops):
        msg = (
            "the gradient of the gradient of attention has no kernel but torch.math, which the policy or the call does"
            " not ask for. Fix: ask for torch.math where gradients are differentiated again, or use mode: prefer"
        )
        raise UnsupportedOperationError(msg, engine="torch")
    number = 0 if active is None else active.number
    if number not in _said:
        _said.add(number)
        msg = (
            "the gradient of the gradient of attention runs by torch.math, whatever the policy asks for: no other"
            " kernel has it"
        )
        warn(msg)


def redispatch(op: Any, keyset: Any, *args: Any) -> Any:
    """Call an operator below autograd."""
    with _private_api.below_autograd():
        return op.redispatch(keyset & _private_api.keyset_after_autograd, *args)


class Recorded(_private_api.SingleLevelFunction):  # type: ignore[misc]
    """What an operator leaves with autograd, also inside the transforms of ``torch.func``.

    These hand a level of theirs to the operator as they do to PyTorch's own, whose nodes know nothing of them; so does
    this one, which therefore is no ``torch.autograd.Function``: that is taken for a function that the user calls.
    """

    @classmethod
    def record(cls, *args: Any) -> Any:
        """Return what `forward` does, and leave the node with autograd."""
        if not _private_api.has_transforms():
            return cls.apply(*args)
        with _private_api.single_level_functions():
            return cls.apply(*args)


class _Attention(Recorded):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        results = operator.run_forward(*args) if keyset is None else redispatch(_forward_op, keyset, *args)
        _keep_forward(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *_backward(ctx, *grads))


class _Gradient(Recorded):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        gradients = redispatch(_backward_op, keyset, *args)
        _keep_backward(ctx, args, gradients)
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *_backward_again(ctx, *grads))


def autograd_kernel(op: Any, node: type[Recorded]) -> Callable[..., Any]:
    """Return the kernel of an operator at autograd's key, which records a node where a gradient will be wanted."""

    def run(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and _private_api.any_requires_grad(*args):
            return node.record(keyset, *args)
        return redispatch(op, keyset, *args)

    return run


LIBRARY.impl("attention", autograd_kernel(_forward_op, _Attention), "Autograd", with_keyset=True)
LIBRARY.impl("attention_backward", autograd_kernel(_backward_op, _Gradient), "Autograd", with_keyset=True)


def _folded(info: Any, in_dims: tuple[Any, ...], tensors: tuple[Any, ...], mask_at: int) -> list[Any]:
    """Return the tensors of a call under ``vmap``, the mapped dimension folded into the batch; the last is `rng`."""
    n = info.batch_size
    folded: list[Any] = []
    for number, (x, dim) in enumerate(zip(tensors, in_dims, strict=False)):
        if x is None or number == len(tensors) - 1:
            folded.append(x)
        elif number != mask_at:
            folded.append((x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1))
        elif dim is None and (x.dim() < 4 or x.shape[0] == 1):
            folded.append(x)  # it broadcasts over the batch
        else:
            expanded = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
            while expanded.dim() < 5:
                expanded = expanded.unsqueeze(1)
            first, at = tensors[0], in_dims[0]
            batch = first.shape[0] if at is None else first.movedim(at, 0).shape[1]
            folded.append(expanded.expand(n, batch, *expanded.shape[2:]).flatten(0, 1))
    return folded


def _mapped_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    n = info.batch_size
    tensors = _folded(info, in_dims, args[:5], 3)
    dropout_p, is_causal, scale, kernel, want_lse, phase, module = args[5:]
    # Whether gradients are recorded of what is mapped, the caller cannot see: a mapped tensor does not say it.
    want_lse = want_lse or (torch.is_grad_enabled() and _private_api.any_requires_grad(*tensors))
    out, lse = _forward_op(*tensors, dropout_p, is_causal, scale, kernel, want_lse, phase, module)
    lse = lse.unflatten(0, (n, -1)) if lse.dim() == 3 else lse.unsqueeze(0).expand(n, 0)
    return (out.unflatten(0, (n, -1)), lse), (0, 0)


def _mapped_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    gradients = _backward_op(*_folded(info, in_dims, args[:8], 6), *args[8:])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in gradients), (0, 0, 0)


torch.library.register_vmap("xpuruntime::attention", _mapped_forward, lib=LIBRARY)
torch.library.register_vmap("xpuruntime::attention_backward", _mapped_backward, lib=LIBRARY)
