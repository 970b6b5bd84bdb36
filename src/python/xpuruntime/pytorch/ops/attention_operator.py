# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xpuruntime::attention`` and ``xpuruntime::attention_backward``: attention as operators of PyTorch's dispatcher.

The kernel is chosen whenever they run, by the active policy then: a compiled graph that has them obeys a policy that
it was not compiled for. They differ from ``aten::scaled_dot_product_attention`` in what they return, the logarithm of
the sum of exponentials beside the output, and in that dropout is a function of `rng`, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import register_flop_formula

from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.advised import may_concern
from xpuruntime.pytorch.attention.call import AttentionCall, traits
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, by_backend
from xpuruntime.pytorch.attention.selection import deterministic, find_route, native_rejection, policy_for_xrt
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.context import CONTEXT, attention_kind, call_key, thread_policy
from xpuruntime.pytorch.providers.bound import BoundKernel

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.dispatch.route import Route

LIBRARY = torch.library.Library("xpuruntime", "FRAGMENT")

_OPTIONS = "Tensor? mask, Tensor? rng, float dropout_p, bool is_causal, float? scale, str kernel"
LIBRARY.define(
    f"attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}, bool want_lse, str phase, str module)"
    " -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
    f" {_OPTIONS}, str module) -> (Tensor, Tensor, Tensor)"
)

_dispatch_key = _private_api.dispatch_key
_AUTOCAST = _private_api.dispatch_keyset(_dispatch_key("AutocastCPU")) | _private_api.dispatch_keyset(
    _dispatch_key("AutocastCUDA")
)
_op_attention = _core.op_attention
_op_attention_backward = _core.op_attention_backward


def by_torch(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Return attention by PyTorch's own kernel: by the one of an id, or by its own choice for any other id."""
    grouped = q.shape[1] != k.shape[1]
    attend = torch.ops.aten.scaled_dot_product_attention.default
    turn = by_backend(kernel if kernel in BACKENDS else None)
    with thread_policy(None), _private_api.without_keys(_AUTOCAST), turn:
        return attend(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rng: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    kernel: str,
    want_lse: bool,
    phase: str,
    module: str,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention now, by the kernel that the active policy gives it."""
    active = policy_for_xrt(kernel)
    arrays = (query, key, value) if mask is None else (query, key, value, mask)
    seen = call_key("attention", *arrays) or ("attention", *(traits(x) for x in arrays))
    known = (seen, dropout_p > 0, is_causal, want_lse, phase, module, deterministic(active))
    route = active.routes.get(known)
    if route is None:
        route = _find(
            active, known, False, query, key, value, mask, dropout_p, is_causal, scale, want_lse, phase, module
        )
    while True:
        if route.place is None:
            return _forward_by_torch(route, query, key, value, mask, dropout_p, is_causal, scale, want_lse)
        if isinstance(route.place, BoundKernel):
            # Its limits were asked when the route was found, unless that is one of calls of other lengths.
            operands = (query, key, value, mask, is_causal, scale, want_lse, phase)
            try:
                attended: tuple[Tensor, Tensor | None] = _run("attention", route, route.place.attention, operands)
            except UnsupportedOperationError as error:
                route = _find(
                    active, known, False, query, key, value, mask, dropout_p, is_causal, scale, want_lse, phase, module,
                    active.refused(route, error),
                )  # fmt: skip
                continue
            return attended
        out = torch.empty_like(query)
        args = (
            route.place, query, key, value, mask, rng, out,
            want_lse, "top_left" if is_causal else False, scale, dropout_p, _phase(phase), None,
        )  # fmt: skip
        try:
            results = _run("attention", route, _op_attention, args)
        except UnsupportedOperationError as error:
            skip = active.refused(route, error)
            route = _find(
                active,
                known,
                False,
                query,
                key,
                value,
                mask,
                dropout_p,
                is_causal,
                scale,
                want_lse,
                phase,
                module,
                skip,
            )
            continue
        return out, results[1] if want_lse else None


def run_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    rng: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    kernel: str,
    module: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention for query, key and value now; the arguments are those of `run_forward`."""
    active = policy_for_xrt(kernel)
    phase = "backward"
    arrays = (query, key, value) if mask is None else (query, key, value, mask)
    seen = call_key("attention_backward", *arrays) or ("attention_backward", *(traits(x) for x in arrays))
    known = (seen, dropout_p > 0, is_causal, module, deterministic(active))
    route = active.routes.get(known)
    if route is None:
        route = _find(active, known, True, query, key, value, mask, dropout_p, is_causal, scale, True, phase, module)
    dense = _dense(grad_out)
    while True:
        if route.place is None:
            return _backward_by_torch(route, grad_out, query, key, value, mask, dropout_p, is_causal, scale)
        if isinstance(route.place, BoundKernel):
            operands = (dense, query, key, value, out, lse, mask, is_causal, scale)
            try:
                kernel_gradients: tuple[Tensor, Tensor, Tensor] = _run(
                    "attention_backward", route, route.place.attention_backward, operands
                )
            except UnsupportedOperationError as error:
                route = _find(
                    active, known, True, query, key, value, mask, dropout_p, is_causal, scale, True, phase, module,
                    active.refused(route, error),
                )  # fmt: skip
                continue
            return kernel_gradients
        gradients = tuple(torch.empty_like(x) for x in (query, key, value))
        args = (
            route.place, dense, query, key, value, out, lse,
            mask, rng, *gradients, "top_left" if is_causal else False, scale,
            dropout_p, None,
        )  # fmt: skip
        try:
            _run("attention_backward", route, _op_attention_backward, args)
        except UnsupportedOperationError as error:
            skip = active.refused(route, error)
            route = _find(
                active, known, True, query, key, value, mask, dropout_p, is_causal, scale, True, phase, module, skip
            )
            continue
        return gradients


def _find(
    active: CompiledPolicy, known: Any, backward: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    dropout_p: float,
    is_causal: bool, scale: float | None, needs_grad: bool, phase: str, module: str,
    skip: tuple[tuple[str, str], ...] = (),
) -> Route:  # fmt: skip
    tensors = type(q) is type(k) is type(v) is torch.Tensor
    rest = (backward, dropout_p > 0, is_causal, needs_grad, phase, module, deterministic(active))
    seen = attention_kind("attention", q, k, v, mask) if tensors and not skip else None
    kind = None if seen is None else (seen, rest)
    route = active.of_kind(known, kind)
    if route is not None and route.place is not None:
        return route  # which refuses what it cannot serve; then the next is looked for
    call = AttentionCall(
        q.detach().requires_grad_(needs_grad), k.detach(), v.detach(), mask, dropout_p, is_causal, scale,
        enable_gqa=q.shape[1] != k.shape[1], needs_grad=needs_grad, backward=backward,
        phase=phase if active.by_phase else "", module=module if active.by_module else "",
    )  # fmt: skip
    if route is None or native_rejection(route.kernel, call):
        route = find_route(
            active, known, call, lambda: by_torch("torch.sdpa", *call[:4], dropout_p, is_causal, scale), skip=skip
        )
        active.keep_kind(None if may_concern(call) else kind, route)
    return route


def _phase(phase: str) -> str | None:
    return phase or None


def _dense(grad_out: Tensor) -> Tensor:
    if grad_out.stride(-1) == 1 and all(n % 8 == 0 and n > 0 for n in grad_out.stride()[:-1]):
        return grad_out
    return grad_out.contiguous()


def _run(name: str, route: Route, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if CONTEXT.observer is not None:
        return CONTEXT.observer.call(f"xpuruntime::{name}", "attention", route, run, args, {})
    return run(*args)


def _no_dropout(route: Route, what: str) -> UnsupportedOperationError:
    msg = (
        f"{what} of attention with dropout cannot run by {route.kernel}: which weights are dropped is an argument of"
        " this operator, and PyTorch's kernels draw their own"
    )
    if route.passed_over:
        msg += f". {route.source} asks for {', '.join(route.asked)}: {route.reasons}"
    return UnsupportedOperationError(f"{msg}. Fix: ask for a kernel that can serve it, or leave dropout out")


def _forward_by_torch(
    route: Route, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, want_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if dropout_p > 0:
        raise _no_dropout(route, "the forward")
    out = torch.empty_like(q)

    def attend(*_: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out.copy_(by_torch(route.kernel, q, k, v, mask, 0.0, is_causal, scale))
        with thread_policy(None):
            return out, _lse(q, k, mask, is_causal, scale) if want_lse else None

    with torch.no_grad():
        result: tuple[Tensor, Tensor | None] = _run("attention", route, attend, (q, k, v, mask))
    return result


def _lse(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Return the scores' logsumexp, for a gradient by an xpuruntime kernel."""
    # The scores are made for as many queries at a time as take the memory of `q` and `k`.
    batch, heads, length, head_dim = q.shape
    n_keys, wide = k.shape[2], torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = k.to(wide)
    keys = (keys.repeat_interleave(heads // k.shape[1], 1) if heads > k.shape[1] else keys).flatten(0, 1).mT
    factor = head_dim**-0.5 if scale is None else scale
    lse = q.new_full((batch, heads, length), -torch.inf, dtype=torch.float32)
    if not (lse.numel() and n_keys):
        return lse
    rows = min(length, max(1, (q.numel() + k.numel()) // (batch * heads * n_keys)))
    scores = q.new_empty((batch * heads, rows, n_keys), dtype=wide)
    for start in range(0, length, rows):
        end = min(start + rows, length)
        block = torch.bmm((q[:, :, start:end].to(wide) * factor).flatten(0, 1), keys, out=scores[:, : end - start])
        block = block.unflatten(0, (batch, heads))
        if is_causal:
            block.masked_fill_(torch.ones_like(block[0, 0], dtype=torch.bool).triu_(1 + start), -torch.inf)
        if mask is not None:
            part = mask[..., start:end, :] if mask.shape[-2] > 1 else mask
            block.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else block.add_(part)
        highest = block.amax(-1, keepdim=True)
        highest.masked_fill_(highest == -torch.inf, 0)
        lse[:, :, start:end] = block.sub_(highest).exp_().sum(-1).log_().add_(highest.squeeze(-1))
    return lse


def _backward_by_torch(
    route: Route, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if dropout_p > 0:
        raise _no_dropout(route, "the gradient")

    def again(*_: Tensor) -> tuple[Tensor, ...]:
        with _autograd_here(), torch.enable_grad():
            a, b, c = (x.detach().requires_grad_() for x in (q, k, v))
            out = by_torch(route.kernel, a, b, c, mask, 0.0, is_causal, scale)
            gradients: tuple[Tensor, ...] = torch.autograd.grad(out, (a, b, c), grad_out)
            return gradients

    gradients_of_torch = _run("attention_backward", route, again, (grad_out, q, k, v))
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    for gradient, value in zip(gradients, gradients_of_torch, strict=True):
        gradient.copy_(value)
    return gradients


def _autograd_here() -> Any:
    excluded = _private_api.excluded_keys()
    for key in map(_dispatch_key, ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView")):
        excluded = excluded.remove(key)
    return _private_api.with_keys(_private_api.included_keys(), excluded)


def _forward_of_fake(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    want_lse = rest[8]
    return torch.empty_like(query), _lse_of(query, want_lse)


def _lse_of(query: Tensor, wanted: bool) -> Tensor:
    return query.new_empty(query.shape[:3] if wanted else (0,), dtype=torch.float32)


def _backward_of_fake(grad_out: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    del grad_out
    return torch.empty_like(rest[0]), torch.empty_like(rest[1]), torch.empty_like(rest[2])


def _forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = run_forward(query, *rest)
    return out, _lse_of(query, False) if lse is None else lse


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _forward, _key)
    LIBRARY.impl("attention_backward", run_backward, _key)
torch.library.register_fake("xpuruntime::attention", _forward_of_fake, lib=LIBRARY)
torch.library.register_fake("xpuruntime::attention_backward", _backward_of_fake, lib=LIBRARY)


def _flop(query: Any, key: Any, value: Any, of_scores: int, of_values: int) -> int:
    batch, heads, length, head_dim = query
    return int(2 * batch * heads * length * key[2] * (of_scores * head_dim + of_values * value[3]))


def _forward_flop(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _flop(query, key, value, 1, 1)


def _backward_flop(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    del grad_out
    return _flop(query, key, value, 3, 2)


# As many as PyTorch counts for its fused kernels: their backward computes the scores again.
register_flop_formula(torch.ops.xpuruntime.attention)(_forward_flop)
register_flop_formula(torch.ops.xpuruntime.attention_backward)(_backward_flop)


def check(want_lse: bool) -> None:
    """Raise `InputError` where a gradient is to be recorded of a forward that does not keep what it needs."""
    if not want_lse:
        msg = "xpuruntime::attention is called with want_lse=False where gradients are recorded: pass want_lse=True"
        raise InputError(msg)
