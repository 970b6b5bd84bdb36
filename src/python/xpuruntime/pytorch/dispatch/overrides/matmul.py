# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides of matrix products, scaled ones included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy, thread_policy
from xpuruntime.pytorch.dispatch.overrides.fast_kernels import FastKernel, fast_kernel
from xpuruntime.pytorch.dispatch.overrides.native import Native, Override, call_native, prefer_native_error
from xpuruntime.pytorch.dispatch.overrides.product import GemmPlan, Product, fp32_precision, is_deterministic
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

_call_key = context.call_key


def rank_of(name: str) -> int:
    """Return how many dimensions the matrices of an operator have."""
    return 3 if "bmm" in name else 2


def _two(native: Native) -> Callable[..., Any] | FastKernel:
    """Return the override of ``mm`` and ``bmm``, also into `out`, as code that Inductor has compiled calls them."""
    name, rank = native.name, rank_of(native.name)

    def product(keyset: Any, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
        active = active_policy()
        if active is None:
            return call_native(native.name, "matmul", native, (keyset, a, b), kwargs)
        key = _call_key(name, a, b, kwargs["out"]) if kwargs else _call_key(name, a, b)
        return _run(native, active, key, Product(a, b, rank=rank, **kwargs), (keyset, a, b), kwargs)

    return fast_kernel(native, product)


def _three(native: Native) -> Callable[..., Any] | FastKernel:
    """Return the override of ``addmm`` and ``baddbmm``, in every form: into `out`, in place."""
    name, rank = native.name, rank_of(native.name)
    in_place = name.endswith("_")

    def product(keyset: Any, c: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
        active = active_policy()
        if active is None:
            return call_native(native.name, "matmul", native, (keyset, c, a, b), kwargs)
        out = kwargs.get("out")
        key: Any = _call_key(name, c, a, b) if out is None else _call_key(name, c, a, b, out)
        if len(kwargs) > (out is not None):
            key = (key, kwargs.get("beta", 1), kwargs.get("alpha", 1))
        full_product = (
            Product(a, b, c, rank=rank, out=c, **kwargs) if in_place else Product(a, b, c, rank=rank, **kwargs)
        )
        return _run(native, active, key, full_product, (keyset, c, a, b), kwargs)

    return fast_kernel(native, product)


def _typed(native: Native) -> Callable[..., Any]:
    rank = rank_of(native.name)
    adds = "add" in native.name

    def product(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        c = args[0] if adds else None
        a, b, dtype = args[adds:]
        return _any(native, Product(a, b, c, rank=rank, out_dtype=dtype, **kwargs), (keyset, *args), kwargs)

    return product


def _activated(native: Native) -> Callable[..., Any]:
    """Return the override of ``_addmm_activation``. Its GELU is by tanh on CUDA, and by erf on the CPU."""
    gelu = "gelu_tanh" if native.key == "CUDA" else "gelu"

    def product(keyset: Any, c: Tensor, a: Tensor, b: Tensor, *, use_gelu: bool = False, **kwargs: Any) -> Any:
        full_product = Product(a, b, c, rank=2, activation=gelu if use_gelu else "relu", **kwargs)
        return _any(native, full_product, (keyset, c, a, b), {"use_gelu": use_gelu, **kwargs})

    return product


def _any(native: Native, product: Product, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    active = active_policy()
    if active is None:
        return call_native(native.name, "matmul", native, args, kwargs)
    key: Any = _call_key(native.name, product.a, product.b, product.c, product.out)
    key = (key, product.beta, product.alpha, product.activation, product.out_dtype)
    return _run(native, active, key, product, args, kwargs)


def _run(
    native: Native, active: CompiledPolicy, key: Any, product: Product, args: tuple[Any, ...], kwargs: dict[str, Any]
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
            route = _resolve(native, active, key, product, args, kwargs, phase, module, skip)
        call_context: CallContext | None = route.place  # type: ignore[assignment]  # products have no kernels on tensors of PyTorch
        if call_context is None:
            settled = None if not active.decides("matmul") else route  # a switch of PyTorch's decides all calls
            return call_native(native.name, "matmul", native, args, kwargs, settled)
        # Another thread may have kept the route a moment ago, and not its plan yet.
        plan = route.plan or GemmPlan(product)
        # Switches of PyTorch's that may change between two calls.
        tf32, deterministic = plan.has_tf32 and fp32_precision("cuda", "matmul") == "tf32", is_deterministic()
        if tf32 is not call_context.allow_tf32 or deterministic is not call_context.deterministic:
            call_context = active.place(
                route.op, route.kernel, route.source, route.module, allow_tf32=tf32, deterministic=deterministic
            )
        try:
            if CONTEXT.observer is None:
                return product.compute(plan, call_context, phase or None)
            return CONTEXT.observer.call(
                native.name, "matmul", route,
                lambda *_, plan=plan, at=call_context, **__: product.compute(plan, at, phase or None),
                args[1:], kwargs,
            )  # fmt: skip
        except InputError as error:
            with thread_policy(None):
                _functional(native.name, args, kwargs)()  # raises where the arguments are wrong, in PyTorch's words
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
    kwargs: dict[str, Any],
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
    if not route.open or any(word == "auto" for word, _ in skip):
        return route
    # Measured without `out`, which may be what is added, too.
    free = Product(
        a, b, product.c, rank=product.rank, beta=product.beta, alpha=product.alpha, activation=product.activation,
        out_dtype=product.out_dtype,
    )  # fmt: skip
    free_plan = GemmPlan(free)

    def xrt_kernel(call_context: CallContext) -> Any:
        return free.compute(free_plan, call_context, phase or None)

    text = f"{_text_of(native, a, b)};{a.stride()};{b.stride()};{_addend(product)}"
    route = tuning.settle(
        active, key, route, text, _functional(native.name, args, kwargs), xrt_kernel, a.device,
        allow_tf32=tf32, deterministic=deterministic,
    )  # fmt: skip
    route.plan, route.quick = plan, quick
    return route


def _text_of(native: Native, a: Tensor, b: Tensor) -> str:
    return f"aten::{native.name} of {list(a.shape)} and {list(b.shape)} {context.DTYPES.get(a.dtype, a.dtype)}"


def _unseen(key: Any) -> bool:
    """Say whether `call_key` could not see an operand. Such calls share a key, and only PyTorch's own serve."""
    while isinstance(key, tuple):
        key = key[0]
    return key is None


def _addend(product: Product) -> str:
    if product.c is None:
        return ""
    return f"{list(product.c.shape)}*{product.beta};{product.alpha};{product.activation}"


def _functional(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call of the same operator that writes into nothing given, to be made where no policy holds."""
    packet, _, overload = name.partition(".")
    overload = {"": "default", "out": "default", "dtype_out": "dtype"}.get(overload, overload)
    op = getattr(getattr(torch.ops.aten, packet.removesuffix("_")), overload)
    rest = {key: value for key, value in kwargs.items() if key != "out"}

    return lambda: op(*args[1:], **rest)


_KEYS = ("CPU", "CUDA")


_op_matmul = _core.op_matmul
_OUT = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(slots=True, eq=False, repr=False)
class _ScaledProduct:
    """``(scale_a * a) @ (scale_b * b) + bias``, in `out_dtype`."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None = None
    scale_result: Tensor | None = None
    out_dtype: torch.dtype | None = None
    #: A permission to be less exact, which no xpuruntime kernel needs.
    use_fast_accum: bool = False
    out: Tensor | None = field(default=None, kw_only=True)

    @property
    def unsupported_reason(self) -> str:
        if self.a.dtype != torch.float8_e4m3fn or self.b.dtype != torch.float8_e4m3fn:
            return f"float8_e4m3fn is multiplied, and these are {self.a.dtype} and {self.b.dtype}"
        if self.scale_a.numel() != 1 or self.scale_b.numel() != 1:
            return "one scale for each matrix is taken, and these have one for each row or block"
        if self.scale_a.dtype != torch.float32 or self.scale_b.dtype != torch.float32:
            return "scales in float32 are taken"
        if self.out_dtype not in _OUT:
            return "the result is in bfloat16, float16 or float32; state out_dtype"
        if self.bias is not None and self.bias.dtype not in _OUT:
            return f"a bias in bfloat16, float16 or float32 is added, and this is {self.bias.dtype}"
        if self.scale_result is not None:
            return "a result is not scaled"
        return ""

    @property
    def native(self) -> bool:
        a, b, out = self.a, self.b, self.out
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.numel() == 0 or b.numel() == 0:
            return True
        if out is None:
            return False
        return out.dtype != self.out_dtype or out.shape != (a.shape[0], b.shape[1]) or not out.is_contiguous()

    def compute(self, route: Route, phase: str) -> Any:
        call_context: CallContext = route.place  # type: ignore[assignment]
        out_dtype = _OUT[self.out_dtype] if self.out_dtype is not None else None
        return _op_matmul(
            call_context, self.a, self.b, self.bias, self.scale_a, self.scale_b, self.out, None, out_dtype,
            phase or None, None,
        )  # fmt: skip


def _scaled(native: Native) -> Callable[..., Any]:
    name = native.name

    def scaled_mm(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        active = active_policy()
        if active is None:
            return call_native(name, "matmul", native, (keyset, *args), kwargs)
        product = _ScaledProduct(*args, **kwargs)
        phase, module = active.call_context()
        arrays = (product.a, product.b, product.scale_a, product.scale_b, product.bias, product.out)
        seen = context.call_key(name, *arrays)
        key = (seen, product.out_dtype, product.scale_result is None, phase, module)
        route = active.routes.get(key)
        skip: tuple[tuple[str, str], ...] = ()
        while True:
            if route is None:
                with prefer_native_error(lambda: native(keyset, *args, **kwargs)):
                    route = _find_route(name, active, key, product, phase, module, skip)
            if route.place is None:
                return call_native(name, "matmul", native, (keyset, *args), kwargs, route)
            try:
                if CONTEXT.observer is None:
                    return product.compute(route, phase)
                return CONTEXT.observer.call(
                    name, "matmul", route, lambda *_, at=route, **__: product.compute(at, phase), args, kwargs
                )
            except (UnsupportedOperationError, InputError) as error:
                if isinstance(error, InputError):
                    native(keyset, *args, **kwargs)  # raises where the arguments are wrong, in PyTorch's words
                skip, route = active.refused(route, error), None

    return scaled_mm


def _find_route(
    name: str,
    active: CompiledPolicy,
    key: Any,
    product: _ScaledProduct,
    phase: str,
    module: str,
    skip: tuple[tuple[str, str], ...],
) -> Route:
    if not active.decides("matmul") or key[0] is None or product.native:
        return active.keep_native(key, "matmul")
    a, b = product.a, product.b
    facts = facts_of_call(
        "matmul", device=a.device, dtype=a.dtype, phase=phase, module=module,
        sizes={"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]},
    )  # fmt: skip
    return active.resolve(
        key, facts, skip=skip, unsupported_reason=product.unsupported_reason,
        description=f"aten::{name} of {list(a.shape)} and {list(b.shape)} {context.DTYPES.get(a.dtype, a.dtype)}"
        f" on {a.device}",
    )  # fmt: skip


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
    *(Override(f"_scaled_mm{form}", "matmul", ("CPU", "CUDA"), _scaled) for form in ("", ".out")),
)
