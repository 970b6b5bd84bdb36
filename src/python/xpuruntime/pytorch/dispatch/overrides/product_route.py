# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Route of a `Product`, and the call by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import call_state, context, tuning
from xpuruntime.pytorch.dispatch.overrides.product import Plan, Product

if TYPE_CHECKING:
    from xpuruntime.ops.ambient import Place
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.overrides.native import Native
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["allow_tf32", "compute", "find_route"]

_is_deterministic = _private_api.is_deterministic
_fp32_precision = _private_api.fp32_precision


def allow_tf32(tensor: torch.Tensor) -> bool:
    """Say whether PyTorch would multiply these by TF32: by the switch, which may change between two calls."""
    return (
        tensor.dtype is torch.float32 and tensor.device.type == "cuda" and _fp32_precision("cuda", "matmul") == "tf32"
    )


def compute(active: CompiledPolicy, route: Route, product: Product, phase: str) -> Any:
    """Do it by the xpuruntime kernel that the route says, under PyTorch's switches as they are now."""
    place = route.place
    assert place is not None
    tf32, deterministic = allow_tf32(product.a), _is_deterministic()
    if tf32 is not place.allow_tf32 or deterministic is not place.deterministic:
        place = active.place(
            route.op, route.kernel, route.source, route.module, allow_tf32=tf32, deterministic=deterministic
        )
    # Another thread may have kept the route a moment ago, and not its plan yet.
    return product.compute(route.plan or Plan(product), place, phase or None)


def find_route(
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
    """Find the route for a call, and keep it. Raises UnsupportedOperationError as `CompiledPolicy.route`."""
    if not active.decides("matmul") or _unseen(key) or product.native:
        return active.keep_native(key, "matmul")
    a, b = product.a, product.b
    tf32, deterministic = allow_tf32(a), _is_deterministic()
    name = f"aten::{native.name} of {list(a.shape)} and {list(b.shape)} {call_state.DTYPES.get(a.dtype, a.dtype)}"
    route = active.route(
        key, "matmul", device=a.device, dtype=a.dtype, allow_tf32=tf32, deterministic=deterministic, skip=skip,
        phase=phase, module=module, description=f"{name} on {a.device}", m=a.shape[-2], n=b.shape[-1], k=a.shape[-1],
    )  # fmt: skip
    plan = route.plan = Plan(product)
    quick = active.in_fast_path and plan.is_quick(product)
    route.quick = quick and not route.open
    if not route.open or any(kernel_name == "auto" for kernel_name, _ in skip):
        return route
    # Measured without `out`, which may be what is added, too.
    free = Product(
        a, b, product.c, rank=product.rank, beta=product.beta, alpha=product.alpha, activation=product.activation,
        out_dtype=product.out_dtype,
    )  # fmt: skip
    free_plan = Plan(free)

    def xrt_kernel(place: Place) -> Any:
        return free.compute(free_plan, place, phase or None)

    text = f"{name};{a.stride()};{b.stride()};{_addend(product)}"
    route = tuning.settle(
        active, key, route, text, _functional(native.name, args, more), xrt_kernel, a.device,
        allow_tf32=tf32, deterministic=deterministic,
    )  # fmt: skip
    route.plan, route.quick = plan, quick
    return route


def _unseen(key: Any) -> bool:
    """Say whether `calls.call_key` could not see an operand. Such calls share a key, and only PyTorch's own serve."""
    while isinstance(key, tuple):
        key = key[0]
    return key is None


def _addend(product: Product) -> str:
    if product.c is None:
        return ""
    return f"{list(product.c.shape)}*{product.beta};{product.alpha};{product.activation}"


def _functional(name: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """Return a call of the same operator by PyTorch's own kernel that writes into nothing given."""
    packet, _, overload = name.partition(".")
    overload = {"": "default", "out": "default", "dtype_out": "dtype"}.get(overload, overload)
    op = getattr(getattr(torch.ops.aten, packet.removesuffix("_")), overload)
    rest = {key: value for key, value in more.items() if key != "out"}

    def native() -> Any:
        with context.thread_policy(None):
            return op(*args[1:], **rest)

    return native
