# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Override of ``scaled_dot_product_attention``.

It is replaced above autograd, where PyTorch chooses among its own kernels. A call goes on to one of those, with their
own gradients, or to ``xpuruntime::attention``, whose gradient the policy decides again.

Not reached are calls of its parts by name, such as ``aten::_flash_attention_forward``; `explain` shows them as
bypassed. PyTorch's other functions for attention, ``varlen_attn`` and ``flex_attention``, have overrides of their own.
The fast path of ``nn.MultiheadAttention`` is turned off; see `attention_switch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import lookup
from xpuruntime.pytorch.attention.advised import may_concern
from xpuruntime.pytorch.attention.call import Arguments, AttentionCall, added_mask, traits
from xpuruntime.pytorch.attention.limits import transforms_and_tangents, xrt_call_rejection
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, by_backend
from xpuruntime.pytorch.attention.selection import find_route, four, is_lowered, is_traceable
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.compiler.strict_exports import is_traced_for_a_program
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy, attention_kind, call_key
from xpuruntime.pytorch.dispatch.overrides.fast_kernels import fast_operator_kernel
from xpuruntime.pytorch.dispatch.overrides.native import Native, Override, prefer_native_error
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID
from xpuruntime.pytorch.ops.attention_gradient import attention
from xpuruntime.pytorch.providers.bound import BoundKernel, call_of

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.dispatch.overrides.fast_kernels import FastKernel
    from xpuruntime.pytorch.dispatch.route import Route

_operator = torch.ops.xpuruntime.attention.default
_modes = _private_api.dispatch_modes
_is_deterministic = _private_api.is_deterministic
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
#: By whether a gradient is recorded.
_PHASES = ("infer", "train")
#: Seeds of the dropout are below this.
_RANDOM_BOUND = 1 << 62


def _scaled_dot_product_attention(native: Native) -> Callable[..., Any] | FastKernel:
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
            return native(
                keyset, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        active = active_policy()
        if active is not None:
            arguments = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if "attention" in active.ops or active.avoids:
                return attend(active, natively, arguments)
            _keep_native(active, arguments)
        return _natively(None, natively, (query, key, value))

    return fast_operator_kernel(native, scaled_dot_product_attention)


def attend(
    active: CompiledPolicy,
    natively: Callable[[], Tensor],
    arguments: Arguments,
    kernel: str = "",
    *,
    explicit: bool = False,
) -> Tensor:
    """Return scaled dot product attention by the kernel that a policy gives it."""
    phase = context.phase() if active.by_phase else ""
    module = (module_paths.traced() or module_paths.current()) if active.by_module else ""
    seen, flags, plain, needs_grad = _key_of(active, arguments, phase, module)
    both = needs_grad and active.by_phase  # then the gradient may be another kernel's
    known = ("sdpa and its gradient", seen) if both else seen
    query, key, value, mask, dropout_p, is_causal, scale, _ = arguments
    if query.is_meta or min(query.dim(), key.dim(), value.dim()) < 2:
        return natively()  # which computes nothing, or refuses it
    if not plain and not explicit and is_traced_for_a_program():
        return natively()
    if mask is not None and not plain and context.is_compiling() and not is_lowered():
        return natively()  # which computes nothing; the mask may be gone when the graph is lowered
    route, assumed = active.routes.get(known), False
    kind = None
    if route is None and plain:
        kind = _kind_of(active, flags, (query, key, value, mask), phase, module, both=both)
        route = active.of_kind(known, kind)
        assumed = route is not None
    call: AttentionCall | None = None
    if route is None or both:
        call = AttentionCall(*arguments, needs_grad, phase=phase, module=module)
        call = call._replace(unfit=xrt_call_rejection(call))
        if route is None:
            with prefer_native_error(natively):
                route = find_route(active, known, call, natively)
            active.keep_kind(None if may_concern(call) else kind, route)
    four_already = query.dim() == 4
    in_rows = all(x.layout is not torch.strided or x.is_nested or x.stride(-1) == 1 for x in (query, key, value))
    while True:
        apart = both and call is not None and _gradient_is_apart(active, route, known, call, kind)
        if route.place is None and not apart:
            if both and plain and not route.open and seen not in active.routes:
                active.keep(seen, route)  # the fast kernel may know that forward and gradient are PyTorch's
                if kind is not None and ("gradient", kind) in active.kinds:
                    active.keep_kind(kind[1], route)
            try:
                return _natively(route, natively, (query, key, value))
            except RuntimeError as error:
                if not assumed or not lookup.has_no_sdp_backend(error):
                    raise
            assumed = False  # the lengths or strides are such that this kernel cannot serve
            call = AttentionCall(*arguments, needs_grad, phase=phase, module=module)
            call = call._replace(unfit=xrt_call_rejection(call))
            with prefer_native_error(natively):
                route = find_route(active, known, call, natively)
            continue
        rng = None
        name = kernel if not route.tuned else f"{route.kernel}?"
        if dropout_p != 0:
            # From PyTorch's generator of the device: repeatable by its seed, and anew in each replay of a CUDA graph.
            rng = torch.randint(0, _RANDOM_BOUND, (2,), dtype=torch.int64, device=query.device)
            # The backward has to drop what the forward has dropped.
            name = route.kernel if kernel else f"{route.kernel}?"
        run = attention if plain else _operator
        q, k, v = (query, key, value) if four_already else (four(query), four(key), four(value))
        added = mask
        if mask is not None and mask.dtype is torch.bool and not plain and _adds_masks(route, mask):
            added = added_mask(mask, query)  # one node of the graph, which layers and gradients share
        try:
            if not plain and not apart and is_traceable(route.place, arguments):
                fixed = {"causal": is_causal, "scale": scale, "lse": needs_grad}
                out = _by_operators(route.place, (q, k, v, added), phase or _PHASES[needs_grad], fixed)
            else:
                out = run(q, k, v, added, rng, dropout_p, is_causal, scale, name, needs_grad, phase, module)[0]
        except (UnsupportedOperationError, InputError) as error:
            if route.place is None:
                raise
            # PyTorch reports wrong arguments in its own words; otherwise the xpuruntime kernel has not served.
            served = None
            if isinstance(error, InputError):
                served = _natively(route, natively, (query, key, value))
            reasons = dict(error.passed_over) if isinstance(error, UnsupportedOperationError) else {}
            word = route.place.word if isinstance(route.place, BoundKernel) else route.kernel
            skip = (*route.passed_over, (word, reasons.get(word, str(error))))
            call = AttentionCall(*arguments, needs_grad, phase=phase, module=module)
            with prefer_native_error(natively):
                route = find_route(active, known, call, natively, skip=skip)
            if served is not None:
                return served
            continue
        # Then the fast kernel may hand over the arrays by itself.
        quick = plain and not kernel and not needs_grad and rng is None and not isinstance(route.place, BoundKernel)
        route.quick = quick and four_already and in_rows
        out = out if four_already else out.reshape(query.shape)
        return out if in_rows else out.contiguous()  # as PyTorch's own result lies in memory then


def _adds_masks(route: Route, mask: Tensor) -> bool:
    adds = isinstance(route.place, BoundKernel) and route.place.kernel.adds_masks and is_lowered()
    return adds and mask.stride(-1) == 1  # the numbers lie as the mask does, and kernels read rows of them


def _by_operators(
    place: BoundKernel, tensors: tuple[Tensor | None, ...], phase: str, attributes: dict[str, Any]
) -> Tensor:
    """Return attention by the operators of a kernel, so that the code calls nothing of this library when it runs."""
    operands = dict(zip(("q", "k", "v", "mask"), tensors, strict=True))
    call = call_of("attention", phase, operands, attributes)
    outputs, _ = place.kernel.forward(call, *(x for x in tensors if x is not None))
    out: Tensor = outputs[0]
    return out


def _key_of(active: CompiledPolicy, arguments: Arguments, phase: str, module: str) -> tuple[Any, int, bool, bool]:
    """Return the key of a call's route, flags in it, whether its tensors are plain, and if a gradient is recorded."""
    # Of plain tensors the key is the one that the fast kernel looks for.
    query, key, value, mask, dropout_p, is_causal, _, enable_gqa = arguments
    records = torch.is_grad_enabled()
    needs_grad = records and (query.requires_grad or key.requires_grad or value.requires_grad)
    learns = records and mask is not None and mask.requires_grad
    kind = 0 if dropout_p == 0 else 1 if dropout_p < 1 else 2
    flags = kind | is_causal << 2 | enable_gqa << 3 | needs_grad << 4 | learns << 5 | _is_deterministic() << 6
    tensors = (query, key, value, mask)
    layers = transforms_and_tangents(tensors)
    plain = not layers and not _modes() and all(type(x) in _PLAIN for x in tensors)
    known: Any = call_key(f"sdpa;{flags}", *tensors) if plain else None
    if known is None:
        known = ("sdpa", flags, layers, *(type(x) for x in tensors), *(traits(x) for x in tensors))
    if active.by_call:
        known = (known, phase, module)
    return known, flags, plain, needs_grad


def _kind_of(
    active: CompiledPolicy, flags: int, tensors: tuple[Tensor | None, ...], phase: str, module: str, *, both: bool
) -> Any:
    """Return the key of all calls that differ from this one in lengths alone; ``None`` where those count."""
    kind: Any = attention_kind(f"sdpa;{flags}", *tensors)
    if kind is not None and active.by_call:
        kind = (kind, phase, module)  # as the fast kernel looks for it
    return kind if kind is None or not both else ("sdpa and its gradient", kind)


def _keep_native(active: CompiledPolicy, arguments: Arguments) -> None:
    """Keep that a call is PyTorch's own, which the policy does not decide, so that the fast kernel knows it."""
    known, _, plain, _ = _key_of(active, arguments, *active.call_context())
    if plain and known not in active.routes:
        active.keep_native(known, "attention")


def _natively(route: Route | None, natively: Callable[[], Tensor], tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    pinned = route.kernel if route is not None and route.kernel in BACKENDS else None
    tuned = route is not None and route.tuned

    def run(*_: Tensor) -> Tensor:
        with by_backend(pinned, only_if_enabled=tuned):
            return natively()

    if CONTEXT.observer is None or any(isinstance(x, _private_api.fake_tensor()) for x in tensors):
        return run()  # of fake tensors, nothing is computed; the recorder knows where operators are traced
    output: Tensor = CONTEXT.observer.call("scaled_dot_product_attention", "attention", route, run, tensors, {})
    return output


def _gradient_is_apart(active: CompiledPolicy, route: Route, known: Any, call: AttentionCall, kind: Any) -> bool:
    """Say whether the policy asks for another kernel in the backward than PyTorch takes after this forward."""
    if call.dropout_p > 0 or call.unfit:
        _one_kernel_for_both(active, route, known, call)
        return False
    mark = ("gradient", known)
    of_gradient = None if kind is None or may_concern(call) else ("gradient", kind)
    gradient_route = active.routes.get(mark) or active.of_kind(mark, of_gradient)
    if gradient_route is None:
        gradient_route = find_route(active, mark, call._replace(backward=True, phase="backward"), _nothing)
        active.keep_kind(of_gradient, gradient_route)
    return gradient_route.kernel != route.kernel and (
        gradient_route.place is not None or gradient_route.kernel in BACKENDS
    )


def _nothing() -> None:
    """Stand for a call that is not measured."""


def _one_kernel_for_both(active: CompiledPolicy, route: Route, known: Any, call: AttentionCall) -> None:
    """Say, or refuse, that a rule for the backward cannot hold, because it has to follow this forward."""
    mark = ("gradient", known)
    if mark in active.routes:
        return
    gradient = call._replace(backward=True, phase="backward")
    resolved = active.resolve(mark, gradient.facts(), description=str(gradient))
    if resolved.kernel in (route.kernel, DEFAULT_ID["attention"]):
        return
    why = call.unfit or "with dropout, the gradient is by the kernel of the forward, which knows what it dropped"
    skip = tuple((name, why) for name in resolved.asked)
    active.resolve(mark, gradient.facts(), skip=skip, description=str(gradient))


OVERRIDES = (
    Override(
        "scaled_dot_product_attention",
        "attention",
        # vmap has a kernel of its own at each of the last two, which goes around the first.
        ("CompositeImplicitAutograd", "FuncTorchBatched", "FuncTorchVmapMode"),
        _scaled_dot_product_attention,
    ),
)
