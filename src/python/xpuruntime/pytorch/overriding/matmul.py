# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Matrix products: ``mm``, ``bmm``, ``addmm``, ``baddbmm``, their overloads, and ``_addmm_activation``.

`torch.matmul`, ``@``, `torch.einsum`, `torch.nn.Linear` and their backward all end in these. Products with a vector
(``mv``, ``addmv``, ``dot``) are no matmul of a policy: they run as PyTorch has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import calls, held, module_paths
from xpuruntime.pytorch.overriding.native import Native, Override
from xpuruntime.pytorch.overriding.product import Product
from xpuruntime.pytorch.overriding.product_route import compute, find_route
from xpuruntime.pytorch.overriding.scaled_mm import OVERRIDES as SCALED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.held import Held
    from xpuruntime.pytorch.routing import Route

__all__ = ["OVERRIDES"]

_current = held.current
_call_key = calls.call_key


def _two(native: Native) -> Callable[..., Any]:
    """Return what stands for ``mm`` and ``bmm``."""
    name = native.name

    def product(keyset: Any, a: Tensor, b: Tensor) -> Any:
        held = _current()
        if held is not None:
            key = _call_key(name, a, b)
            if held.by_call:
                key = _with_call(held, key)
            route = held.routes.get(key)
            if route is None or route.place is not None or calls.recorder is not None:
                return _run(native, held, key, route, Product(a, b), (keyset, a, b), {})
        elif calls.recorder is not None:
            return calls.recorder.call(name, "matmul", None, native, (keyset, a, b), {})
        try:
            return native.call(keyset, a, b)
        except RuntimeError as error:
            return native.again(error, keyset, a, b)

    return product


def _two_into(native: Native) -> Callable[..., Any]:
    """Return what stands for ``mm.out`` and ``bmm.out``, which code compiled by Inductor calls."""
    name = native.name

    def product(keyset: Any, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        held = _current()
        if held is not None:
            key = _call_key(name, a, b, out)
            if held.by_call:
                key = _with_call(held, key)
            route = held.routes.get(key)
            if route is None or route.place is not None or calls.recorder is not None:
                return _run(native, held, key, route, Product(a, b, out=out), (keyset, a, b), {"out": out})
        elif calls.recorder is not None:
            return calls.recorder.call(name, "matmul", None, native, (keyset, a, b), {"out": out})
        try:
            return native.call(keyset, a, b, out=out)
        except RuntimeError as error:
            return native.again(error, keyset, a, b, out=out)

    return product


def _three(native: Native) -> Callable[..., Any]:
    """Return what stands for ``addmm`` and ``baddbmm``, in every form: into `out`, in place."""
    name = native.name
    in_place = name.endswith("_")

    def product(keyset: Any, c: Tensor, a: Tensor, b: Tensor, **more: Any) -> Any:
        held = _current()
        if held is not None:
            key: Any = _call_key(name, a, b, c, more.get("out"))
            if more:
                key = (key, more.get("beta", 1), more.get("alpha", 1))
            if held.by_call:
                key = _with_call(held, key)
            route = held.routes.get(key)
            if route is None or route.place is not None or calls.recorder is not None:
                whole = Product(a, b, c, **more) if not in_place else Product(a, b, c, out=c, **more)
                return _run(native, held, key, route, whole, (keyset, c, a, b), more)
        elif calls.recorder is not None:
            return calls.recorder.call(name, "matmul", None, native, (keyset, c, a, b), more)
        try:
            return native.call(keyset, c, a, b, **more)
        except RuntimeError as error:
            return native.again(error, keyset, c, a, b, **more)

    return product


def _typed(native: Native) -> Callable[..., Any]:
    """Return what stands for the overloads with a dtype for the result, such as ``mm.dtype``."""
    name = native.name
    adds = "add" in name

    def product(keyset: Any, *args: Any, **more: Any) -> Any:
        c = args[0] if adds else None
        a, b, dtype = args[adds:]
        return _any(native, Product(a, b, c, out_dtype=dtype, **more), (keyset, *args), more)

    return product


def _activated(native: Native) -> Callable[..., Any]:
    """Return what stands for ``_addmm_activation``. Its GELU is by tanh on CUDA, and by erf on the CPU."""
    gelu = "gelu_tanh" if native.key == "CUDA" else "gelu"

    def product(keyset: Any, c: Tensor, a: Tensor, b: Tensor, *, use_gelu: bool = False, **more: Any) -> Any:
        whole = Product(a, b, c, activation=gelu if use_gelu else "relu", **more)
        return _any(native, whole, (keyset, c, a, b), {"use_gelu": use_gelu, **more})

    return product


def _any(native: Native, product: Product, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    held = _current()
    if held is None:
        if calls.recorder is not None:
            return calls.recorder.call(native.name, "matmul", None, native, args, more)
        return native(*args, **more)
    key: Any = _call_key(native.name, product.a, product.b, product.c, product.out)
    key = (key, product.beta, product.alpha, product.activation, product.out_dtype)
    if held.by_call:
        key = _with_call(held, key)
    return _run(native, held, key, held.routes.get(key), product, args, more)


def _with_call(held: Held, key: Any) -> Any:
    return (
        key,
        calls.phase() if held.by_phase else "",
        module_paths.current() if held.by_module else "",
    )


def _run(
    native: Native, held: Held, key: Any, route: Route | None, product: Product, args: tuple[Any, ...], more: Any
) -> Any:
    """Do a call by the kernel of its route, which is found where it is not known."""
    skip: tuple[tuple[str, str], ...] = ()
    phase, module = key[1:] if held.by_call else ("", "")
    while True:
        if route is None:
            route = find_route(native, held, key, product, args, more, phase, module, skip)
        if route.place is None:
            if calls.recorder is not None:
                return calls.recorder.call(native.name, "matmul", route, native, args, more)
            return native(*args, **more)
        try:
            if calls.recorder is None:
                return compute(held, route, product, phase)
            return calls.recorder.call(native.name, "matmul", route, _Ours(held, route, product, phase), args[1:], more)
        except (UnsupportedOperationError, InputError) as error:
            if route.plan.folds:
                route.plan = route.plan.unfolded()
                continue
            skip = held.refused(route, error)
            route = None


class _Ours:
    """What a recorder runs where a kernel of ours serves: with the operator's own arguments, which it has already."""

    __slots__ = ("_held", "_phase", "_product", "_route")

    def __init__(self, held: Held, route: Route, product: Product, phase: str) -> None:
        self._held = held
        self._route = route
        self._product = product
        self._phase = phase

    def __call__(self, *args: Any, **more: Any) -> Any:
        del args, more
        return compute(self._held, self._route, self._product, self._phase)


_KEYS = ("CPU", "CUDA")
OVERRIDES = (
    *(Override(name, "matmul", _KEYS, _two) for name in ("mm", "bmm")),
    *(Override(f"{name}.out", "matmul", _KEYS, _two_into) for name in ("mm", "bmm")),
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
    *SCALED,
)
