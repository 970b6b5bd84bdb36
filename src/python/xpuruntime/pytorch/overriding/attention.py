# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention: ``scaled_dot_product_attention``, given to the kernel that a policy asks for.

It is replaced above autograd, where PyTorch chooses among its own kernels. A call goes on to one of those, with their own
gradients, or to ``xpuruntime::attention``, whose gradient the policy decides again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import calls, module_paths
from xpuruntime.pytorch.attention_calls import AttentionCall, deterministic, find_route, four, whole
from xpuruntime.pytorch.attention_limits import reason_against_all_of_ours, transforms
from xpuruntime.pytorch.held import Held, current
from xpuruntime.pytorch.ops.attention_gradient import attention
from xpuruntime.pytorch.overriding.native import Native, Override
from xpuruntime.pytorch.routing import DEFAULT_ID
from xpuruntime.pytorch.sdpa_backends import BACKENDS, by_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.routing import Route

__all__ = ["OVERRIDES", "attend"]

#: Seeds of the dropout are below this.
_RANDOM_BOUND = 1 << 62


def _scaled_dot_product_attention(native: Native) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        keyset: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        def natively() -> Tensor:
            return native(  # type: ignore[no-any-return]
                keyset, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        held = current()
        if held is None or "attention" not in held.ops:
            return _natively(None, natively)
        return attend(held, natively, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return scaled_dot_product_attention


def attend(
    held: Held,
    natively: Callable[[], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str = "",
) -> Tensor:
    """Return scaled dot product attention by the kernel that a policy gives it.

    Parameters
    ----------
    held : Held
    natively : callable
        Does the call by PyTorch's own choice.
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa
        As for ``scaled_dot_product_attention``.
    kernel : str
        What the call itself asks for, as for ``xpuruntime::attention``; `held` is the policy that says so.

    Raises
    ------
    UnsupportedOperationError
        The policy is strict and nothing that it asks for can serve.
    """
    if mask is not None and is_causal:
        return natively()  # which says that these two exclude each other
    phase = calls.phase() if held.by_phase else ""
    module = module_paths.current() if held.by_module else ""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    call = AttentionCall(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, needs_grad, phase=phase, module=module
    )
    known = _key_of(held, call)
    route = held.routes.get(known)
    if route is None:
        call = call._replace(unfit=reason_against_all_of_ours(call))
        route = find_route(held, known, call, natively)
    while True:
        if route.place is None and not (held.by_phase and needs_grad and _gradient_is_apart(held, route, known, call)):
            return _natively(route, natively)
        if held.by_phase and needs_grad and dropout_p > 0:
            _one_kernel_for_both(held, route, known, call)
        try:
            return _ours(route, call, kernel)
        except UnsupportedOperationError as error:
            if route.place is None:
                raise
            route = find_route(held, known, call, natively, skip=held.refused(route, error))
        except InputError as error:
            # PyTorch says in its own words what is wrong; where it finds nothing, our kernel has not served.
            out = _natively(route, natively)
            find_route(held, known, call, natively, skip=(*route.passed_over, (route.kernel, str(error))))
            return out


def _key_of(held: Held, call: AttentionCall) -> Any:
    query, key, value, mask = call[:4]
    mark = None if mask is None else (_sizes(mask.shape), _sizes(mask.stride()), mask.dtype, mask.requires_grad)
    return (
        "sdpa", type(query), _sizes(query.shape), _sizes(key.shape), _sizes(value.shape), _sizes(query.stride()),
        _sizes(key.stride()), _sizes(value.stride()), query.dtype, key.dtype, value.dtype, query.device, mark,
        call.dropout_p > 0, call.dropout_p < 1, call.is_causal, call.enable_gqa, call.needs_grad, call.phase,
        call.module, deterministic(held), transforms(),
    )  # fmt: skip


def _sizes(sizes: Any) -> Any:
    """Return sizes as what a key can hold, also where they are symbols."""
    for n in sizes:
        if type(n) is not int:
            return tuple(whole(n) for n in sizes)
    return sizes


def _natively(route: Route | None, natively: Callable[[], Tensor]) -> Tensor:
    run = natively
    if route is not None and route.kernel in BACKENDS:
        kernel = route.kernel

        def run() -> Tensor:
            with by_backend(kernel):
                return natively()

    if calls.recorder is None or _tracing():
        return run()
    found: Tensor = calls.recorder.call("scaled_dot_product_attention", "attention", route, run, (), {})
    return found


def _tracing() -> bool:
    """Say whether nothing is computed now: code is traced, for `torch.compile` or an export."""
    mode = torch._C._get_dispatch_mode
    keys = torch._C._TorchDispatchModeKey
    return mode(keys.FAKE) is not None or mode(keys.FUNCTIONAL) is not None


def _gradient_is_apart(held: Held, route: Route, known: Any, call: AttentionCall) -> bool:
    """Say whether the policy asks for another kernel in the backward than PyTorch takes after this forward."""
    if call.dropout_p > 0 or call.unfit:
        _one_kernel_for_both(held, route, known, call)
        return False
    mark = ("gradient", known)
    found = held.routes.get(mark)
    if found is None:
        found = find_route(held, mark, call._replace(backward=True, phase="backward"), _nothing)
    return found.kernel != route.kernel and (found.place is not None or found.kernel in BACKENDS)


def _nothing() -> None:
    """Stand for a call that is not measured."""


def _one_kernel_for_both(held: Held, route: Route, known: Any, call: AttentionCall) -> None:
    """Say, or refuse, that a rule for the backward cannot hold, because it has to follow this forward."""
    mark = ("gradient", known)
    if mark in held.routes:
        return
    facts: dict[str, Any] = {"device": call.q.device, "dtype": call.q.dtype, "phase": "backward"}
    facts.update(module=call.module, doing=str(call._replace(backward=True)), head_dim=whole(call.q.shape[-1]))
    asked = held.route(mark, "attention", **facts)
    if asked.kernel in (route.kernel, DEFAULT_ID["attention"]):
        return
    why = call.unfit or "with dropout, the gradient is by the kernel of the forward, which knows what it dropped"
    held.route(mark, "attention", skip=tuple((word, why) for word in asked.asked), **facts)


def _ours(route: Route, call: AttentionCall, kernel: str) -> Tensor:
    query, mask = call.q, call.mask
    rng = None
    if call.dropout_p > 0:
        # From PyTorch's generator of the device: repeatable by its seed, and anew in each replay of a CUDA graph.
        rng = torch.randint(0, _RANDOM_BOUND, (2,), dtype=torch.int64, device=query.device)
        kernel = route.kernel  # the backward has to drop what the forward has dropped
    out, _ = attention(
        four(query), four(call.k), four(call.v), mask, rng, call.dropout_p, call.is_causal, call.scale, kernel,
        call.needs_grad, call.phase, call.module,
    )  # fmt: skip
    return out if query.dim() == 4 else out.reshape(query.shape)


OVERRIDES = (
    Override(
        "scaled_dot_product_attention", "attention", ("CompositeImplicitAutograd",), _scaled_dot_product_attention
    ),
)
