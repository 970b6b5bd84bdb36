# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides of matrix products: ``mm``, ``bmm``, ``addmm``, ``baddbmm``, their overloads, and ``_addmm_activation``.

`torch.matmul`, ``@``, `torch.einsum`, `torch.nn.Linear` and their backward all end in these. Products with a vector
(``mv``, ``addmv``, ``dot``) are no matmul of a policy: they run as PyTorch has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch.dispatch import call_state, tuning
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy, thread_policy
from xpuruntime.pytorch.dispatch.overrides.fast_kernels import FastKernel, fast_kernel
from xpuruntime.pytorch.dispatch.overrides.invoke import call_native
from xpuruntime.pytorch.dispatch.overrides.native import Native, Override
from xpuruntime.pytorch.dispatch.overrides.product import GemmPlan, Product, fp32_precision, is_deterministic
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["OVERRIDES"]

_call_key = call_state.call_key


def rank_of(name: str) -> int:
    """Return how many dimensions the matrices of an operator have."""
    return 3 if "bmm" in name else 2


def _two(native: Native) -> Callable[..., Any] | FastKernel:
    """Return the override of ``mm`` and ``bmm``, also into `out`, as code that Inductor has compiled calls them."""
    name, rank = native.name, rank_of(native.name)

    def product(keyset: Any, a: Tensor, b: Tensor, **more: Any) -> Any:
        active = active_policy()
        if active is None:
            return call_native(native.name, "matmul", native, (keyset, a, b), more)
        key = _call_key(name, a, b, more["out"]) if more else _call_key(name, a, b)
        return _run(native, active, key, Product(a, b, rank=rank, **more), (keyset, a, b), more)

    return fast_kernel(native, product)


def _three(native: Native) -> Callable[..., Any] | FastKernel:
    """Return the override of ``addmm`` and ``baddbmm``, in every form: into `out`, in place."""
    name, rank = native.name, rank_of(native.name)
    in_place = name.endswith("_")

    def product(keyset: Any, c: Tensor, a: Tensor, b: Tensor, **more: Any) -> Any:
        active = active_policy()
        if active is None:
            return call_native(native.name, "matmul", native, (keyset, c, a, b), more)
        out = more.get("out")
        key: Any = _call_key(name, c, a, b) if out is None else _call_key(name, c, a, b, out)
        if len(more) > (out is not None):
            key = (key, more.get("beta", 1), more.get("alpha", 1))
        whole = Product(a, b, c, rank=rank, out=c, **more) if in_place else Product(a, b, c, rank=rank, **more)
        return _run(native, active, key, whole, (keyset, c, a, b), more)

    return fast_kernel(native, product)


def _typed(native: Native) -> Callable[..., Any]:
    """Return the override of the overloads with a dtype for the result, such as ``mm.dtype``."""
    rank = rank_of(native.name)
    adds = "add" in native.name

    def product(keyset: Any, *args: Any, **more: Any) -> Any:
        c = args[0] if adds else None
        a, b, dtype = args[adds:]
        return _any(native, Product(a, b, c, rank=rank, out_dtype=dtype, **more), (keyset, *args), more)

    return product


def _activated(native: Native) -> Callable[..., Any]:
    """Return the override of ``_addmm_activation``. Its GELU is by tanh on CUDA, and by erf on the CPU."""
    gelu = "gelu_tanh" if native.key == "CUDA" else "gelu"

    def product(keyset: Any, c: Tensor, a: Tensor, b: Tensor, *, use_gelu: bool = False, **more: Any) -> Any:
        whole = Product(a, b, c, rank=2, activation=gelu if use_gelu else "relu", **more)
        return _any(native, whole, (keyset, c, a, b), {"use_gelu": use_gelu, **more})

    return product


def _any(native: Native, product: Product, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    active = active_policy()
    if active is None:
        return call_native(native.name, "matmul", native, args, more)
    key: Any = _call_key(native.name, product.a, product.b, product.c, product.out)
    key = (key, product.beta, product.alpha, product.activation, product.out_dtype)
    return _run(native, active, key, product, args, more)


def _run(
    native: Native, active: CompiledPolicy, key: Any, product: Product, args: tuple[Any, ...], more: dict[str, Any]
) -> Any:
    """Do a call by the kernel of its route, which is found where it is not known."""
    phase = module = ""
    if active.by_call:
        phase, module = active.call_context()
        key = (key, phase, module)
    route = active.routes.get(key)
    skip: tuple[tuple[str, str], ...] = ()
    while True:
        if route is None:
            route = _resolve(native, active, key, product, args, more, phase, module, skip)
        place = route.place
        if place is None:
            settled = None if not active.decides("matmul") else route  # a switch of PyTorch's decides all calls
            return call_native(native.name, "matmul", native, args, more, settled)
        # Another thread may have kept the route a moment ago, and not its plan yet.
        plan = route.plan or GemmPlan(product)
        # Switches of PyTorch's that may change between two calls.
        tf32, deterministic = plan.has_tf32 and fp32_precision("cuda", "matmul") == "tf32", is_deterministic()
        if tf32 is not place.allow_tf32 or deterministic is not place.deterministic:
            place = active.place(
                route.op, route.kernel, route.source, route.module, allow_tf32=tf32, deterministic=deterministic
            )
        try:
            if CONTEXT.observer is None:
                return product.compute(plan, place, phase or None)
            return CONTEXT.observer.call(
                native.name, "matmul", route,
                lambda *_, plan=plan, place=place, **__: product.compute(plan, place, phase or None), args[1:], more,
            )  # fmt: skip
        except InputError as error:
            with thread_policy(None):
                _functional(native.name, args, more)()  # raises where the arguments are wrong, in PyTorch's words
            skip, route = active.refused(route, error), None
        except UnsupportedOperationError as error:
            if route.plan is not None and route.plan.folds:
                route.plan, route.quick = route.plan.unfolded(), False
                continue
            skip, route = active.refused(route, error), None


def _resolve(
    native: Native,
    active: CompiledPolicy,
    key: Any,
    product: Product,
    args: tuple[Any, ...],
    more: dict[str, Any],
    phase: str,
    module: str,
    skip: tuple[tuple[str, str], ...],
) -> Route:
    """Find the route for a call, and keep it. Raises UnsupportedOperationError as `CompiledPolicy.resolve`."""
    if not active.decides("matmul") or _unseen(key) or product.native:
        return active.keep_native(key, "matmul")
    a, b = product.a, product.b
    plan = GemmPlan(product)
    tf32, deterministic = plan.has_tf32 and fp32_precision("cuda", "matmul") == "tf32", is_deterministic()
    kind = ("matmul", a.dtype, a.device, phase, module, tf32, deterministic)
    route = None if skip else active.of_kind(key, kind)
    if route is None:
        facts = facts_of_call(
            "matmul", device=a.device, dtype=a.dtype, phase=phase, module=module,
            sizes={"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]},
        )  # fmt: skip
        route = active.resolve(
            key, facts, allow_tf32=tf32, deterministic=deterministic, skip=skip,
            description=f"{_text_of(native, a, b)} on {a.device}",
        )  # fmt: skip
        active.keep_kind(kind, route)
    route.plan = plan
    quick = plan.is_quick(product)
    route.quick = quick and not route.open
    if not route.open or any(one == "auto" for one, _ in skip):
        return route
    # Measured without `out`, which may be what is added, too.
    free = Product(
        a, b, product.c, rank=product.rank, beta=product.beta, alpha=product.alpha, activation=product.activation,
        out_dtype=product.out_dtype,
    )  # fmt: skip
    free_plan = GemmPlan(free)

    def xrt_kernel(place: CallContext) -> Any:
        return free.compute(free_plan, place, phase or None)

    text = f"{_text_of(native, a, b)};{a.stride()};{b.stride()};{_addend(product)}"
    route = tuning.settle(
        active, key, route, text, _functional(native.name, args, more), xrt_kernel, a.device,
        allow_tf32=tf32, deterministic=deterministic,
    )  # fmt: skip
    route.plan, route.quick = plan, quick
    return route


def _text_of(native: Native, a: Tensor, b: Tensor) -> str:
    return f"aten::{native.name} of {list(a.shape)} and {list(b.shape)} {call_state.DTYPES.get(a.dtype, a.dtype)}"


def _unseen(key: Any) -> bool:
    """Say whether `call_key` could not see an operand. Such calls share a key, and only PyTorch's own serve."""
    while isinstance(key, tuple):
        key = key[0]
    return key is None


def _addend(product: Product) -> str:
    if product.c is None:
        return ""
    return f"{list(product.c.shape)}*{product.beta};{product.alpha};{product.activation}"


def _functional(name: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """Return a call of the same operator that writes into nothing given, to be made where no policy holds."""
    packet, _, overload = name.partition(".")
    overload = {"": "default", "out": "default", "dtype_out": "dtype"}.get(overload, overload)
    op = getattr(getattr(torch.ops.aten, packet.removesuffix("_")), overload)
    rest = {key: value for key, value in more.items() if key != "out"}

    return lambda: op(*args[1:], **rest)


_KEYS = ("CPU", "CUDA")
OVERRIDES = (
    *(Override(f"{name}{form}", "matmul", _KEYS, _two) for name in ("mm", "bmm") for form in ("", ".out")),
    *(
        Override(f"{name}{form}", "matmul", _KEYS, _three)
        for name in ("addmm", "baddbmm")
        for form in ("", ".out", "_")
    ),
    *(
        Override(f"{name}.{form}", "matmul", _KEYS, _typed)
        for name in ("mm", "bmm", "addmm", "baddbmm")
        for form in ("dtype", "dtype_out")
    ),
    *(Override(f"_addmm_activation{form}", "matmul", _KEYS, _activated) for form in ("", ".out")),
)
