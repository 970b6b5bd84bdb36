# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Override of ``_scaled_mm``: products of float8 matrices with scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.invoke import call_native, prefer_native_error
from xpuruntime.pytorch.dispatch.overrides.native import Native, Override
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["OVERRIDES"]

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
        """Why no xpuruntime kernel can compute it, or nothing."""
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
        """Whether PyTorch's own is to be called whatever the policy says: for what is empty, or what it refuses."""
        a, b, out = self.a, self.b, self.out
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.numel() == 0 or b.numel() == 0:
            return True
        if out is None:
            return False
        return out.dtype != self.out_dtype or out.shape != (a.shape[0], b.shape[1]) or not out.is_contiguous()

    def compute(self, route: Route, phase: str) -> Any:
        """Compute it by the xpuruntime kernel of a route."""
        assert route.place is not None
        out_dtype = _OUT[self.out_dtype] if self.out_dtype is not None else None
        return _op_matmul(
            route.place, self.a, self.b, self.bias, self.scale_a, self.scale_b, self.out, None, out_dtype,
            phase or None, None,
        )  # fmt: skip


def _scaled(native: Native) -> Callable[..., Any]:
    name = native.name

    def scaled_mm(keyset: Any, *args: Any, **more: Any) -> Any:
        active = active_policy()
        if active is None:
            return call_native(name, "matmul", native, (keyset, *args), more)
        product = _ScaledProduct(*args, **more)
        phase, module = active.call_context()
        arrays = (product.a, product.b, product.scale_a, product.scale_b, product.bias, product.out)
        seen = call_state.call_key(name, *arrays)
        key = (seen, product.out_dtype, product.scale_result is None, phase, module)
        route = active.routes.get(key)
        skip: tuple[tuple[str, str], ...] = ()
        while True:
            if route is None:
                with prefer_native_error(lambda: native(keyset, *args, **more)):
                    route = _find_route(name, active, key, product, phase, module, skip)
            if route.place is None:
                return call_native(name, "matmul", native, (keyset, *args), more, route)
            try:
                if CONTEXT.observer is None:
                    return product.compute(route, phase)
                return CONTEXT.observer.call(
                    name, "matmul", route, lambda *_, at=route, **__: product.compute(at, phase), args, more
                )
            except (UnsupportedOperationError, InputError) as error:
                if isinstance(error, InputError):
                    native(keyset, *args, **more)  # raises where the arguments are wrong, in PyTorch's words
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
        description=f"aten::{name} of {list(a.shape)} and {list(b.shape)} {call_state.DTYPES.get(a.dtype, a.dtype)}"
        f" on {a.device}",
    )  # fmt: skip


OVERRIDES = tuple(Override(f"_scaled_mm{form}", "matmul", ("CPU", "CUDA"), _scaled) for form in ("", ".out"))
