# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Norms of model classes: their forward goes to the kernels of a policy while one decides norms, and is restored after.

A class is adapted by its code, before anything is known of its instances; what a call computes is recognized from the
instance, by its bits. A call that is not recognized, or that no policy speaks of, runs the forward of the class.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from xpuruntime.ops.torch_kernels import is_torch_kernel
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, AdaptedClasses, is_usual
from xpuruntime.pytorch.adapters.norm_formulas import HALVES, Formula, compute, read, reads_of, recognized
from xpuruntime.pytorch.adapters.shared_casts import forward_of_linear, offer, sharing
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.coverage.gaps import CoverageGap, report_gaps
from xpuruntime.pytorch.coverage.operation_table import norm_by_operators, title_of
from xpuruntime.pytorch.dispatch.context import DTYPES, active_policy
from xpuruntime.pytorch.dispatch.overrides import traced_norms
from xpuruntime.pytorch.dispatch.overrides.invoke import call_native
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override
from xpuruntime.pytorch.dispatch.route import Route, facts_of_call
from xpuruntime.pytorch.ops import norm_autograd
from xpuruntime.pytorch.ops.norms import phase_of_norm
from xpuruntime.pytorch.providers.bound import BoundKernel
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["OVERRIDES"]

_NORMS = frozenset(("layer_norm", "rms_norm"))
_DEVICES = ("cpu", "cuda")
#: Scale of a formula to what the kernels of other packages call it.
_FORMS = {"inside": "torch", "after": "llama", "plus_one": "gemma"}
_UNKNOWN = "it computes a norm by elementwise operators, by none of the formulas that this library knows"
_FIX = "use a norm of torch.nn, or leave {op} out of the policy"


def _own_forward(kind: type) -> FunctionType | None:
    """Return the forward that a class itself defines, where it takes rows, or rows and a gate, and may be a norm."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or kind.__module__.partition(".")[0] in ("torch", "xpuruntime"):
        return None
    code = forward.__code__
    if (
        code.co_argcount not in (2, 3)
        or code.co_kwonlyargcount
        or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    ):
        return None
    return forward if norm_by_operators(kind, forward) else None


def _adapter(original: FunctionType) -> Callable[..., Any]:
    names = original.__code__.co_varnames[1 : original.__code__.co_argcount]

    def traced(*facts: Any) -> str:
        return _traced_as(original, *facts)

    def reads(kind: Any) -> tuple[str, ...]:
        return reads_of(kind, original)

    for constant in (traced, reads):
        _private_api.mark_constant(constant)

    # Traced by Dynamo: nothing but what it can follow, and functions that it takes for constants.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs])
        x = operands[0] if len(operands) > 0 else None
        gate = operands[1] if len(operands) > 1 else None
        if len(operands) != len(args) + len(kwargs) or not isinstance(x, torch.Tensor) or len(operands) > len(names):
            return original(self, *args, **kwargs)
        attributes, parameters, plain = read(self, reads(type(self)), x)
        plain = plain and (gate is None or isinstance(gate, torch.Tensor))
        types = tuple([(name, value.dtype) for name, value in parameters])
        columns = x.shape[-1] if plain else 0
        state = (type(self), attributes, types, x.dtype, x.device, columns, x.dim(), gate is not None)
        if torch.compiler.is_compiling():
            text = traced(*state)
        else:
            route, text = _route_of_call(original, state, x, parameters)
            if route is not None:
                return call_native(f"nn::{type(self).__name__}", route.op, original, (self, *args), kwargs, route)
        if text == "":
            return original(self, *args, **kwargs)
        op, scale, gate_order, activation, group_size, eps, form = text.split(" ")
        formula = Formula(op, scale, gate_order, activation, int(group_size))
        weight = parameters[0][1] if len(parameters) > 0 else None
        bias = parameters[1][1] if len(parameters) > 1 else None
        if form != "":
            out = perform(op, {"x": x, "weight": weight}, {"epsilon": float(eps), "formula": form})
        else:
            out = compute(formula, functools.partial(_normalize, op, float(eps)), x, weight, bias, gate)
        if not torch.compiler.is_compiling():
            offer(out)
        return out

    return forward


def _text_of(recognized_formula: tuple[Formula, float], *, by_package: bool) -> str:
    """Return a formula as text, which Dynamo takes for a constant.

    The kernels of other packages have names for what the class does around the norm, and do it, too.
    """
    formula, eps = recognized_formula
    alone = by_package and not formula.gate and not formula.group_size and formula.op == "rms_norm"
    form = _FORMS.get(formula.scale, "") if alone else ""
    return " ".join((*map(str, formula), repr(eps), form))


def _route_of_call(original: FunctionType, state: Any, x: Tensor, parameters: Any) -> tuple[Route | None, str]:
    """Return the route of an eager call where the forward of the class serves, or the formula for a kernel as text.

    Neither where no policy decides the call.
    """
    active = active_policy()
    if active is None or not active.ops & _NORMS or x.device.type not in _DEVICES or not x.numel():
        return None, ""
    phase, module = active.call_context()
    kind, attributes, types, dtype, device, columns, dims, gated = state
    why = "" if is_usual(x, *(tensor for _, tensor in parameters)) else UNUSUAL
    recognized_formula = None if why else recognized(original, kind, attributes, types, dtype, columns, dims, gated)
    op = str(norm_by_operators(kind, original)) if recognized_formula is None else recognized_formula[0].op
    if op not in active.ops:
        return None, ""
    key = ("class", original, state, phase, module, why)
    route = active.routes.get(key)
    if route is None:
        route = active.resolve(
            key, facts_of_call(op, device=device, dtype=dtype, phase=phase, module=module, sizes={}),
            description=f"{title_of(kind)} of {list(x.shape)} {DTYPES.get(dtype, dtype)} on {device}",
            unsupported_reason=why or ("" if recognized_formula is not None else _UNKNOWN),
        )  # fmt: skip
    if recognized_formula is None or (route.native and not route.open):
        return route, ""
    _note(active, kind, recognized_formula[0])
    return None, _text_of(recognized_formula, by_package=isinstance(route.place, BoundKernel))


def _note(active: CompiledPolicy, kind: type, formula: Formula) -> None:
    what = " ".join(filter(None, (formula.op, formula.scale, formula.gate and f"gate {formula.gate}")))
    active.adapted[f"calls of {title_of(kind)} go to the kernels of {formula.op}: its formula is {what}"] = None


def _traced_as(
    original: FunctionType,
    kind: type[torch.nn.Module],
    attributes: Any,
    types: Any,
    dtype: torch.dtype,
    device: torch.device,
    columns: int,
    dims: int,
    gated: bool,
) -> str:
    """Return the formula of a call that is being compiled, where the policy asks for a kernel; else Inductor fuses it.

    The policy that holds is part of the key of compiled code; see `compile_hooks`.
    """
    active = active_policy()
    if active is None or not active.ops & _NORMS:
        return ""
    recognized_formula = recognized(original, kind, attributes, types, dtype, columns, dims, gated)
    op = recognized_formula[0].op if recognized_formula is not None else norm_by_operators(kind, original)
    if op is None or not traced_norms.takes_kernel(op, dtype, device):
        return ""
    if recognized_formula is None:
        report_gaps([CoverageGap(op, title_of(kind), _UNKNOWN, _FIX.format(op=op))], active)
        return ""
    _note(active, kind, recognized_formula[0])
    facts = facts_of_call(
        op, device=device, dtype=dtype, phase=phase_of_norm(), sizes={},
        module=module_paths.in_dynamo() if active.by_module and torch.compiler.is_dynamo_compiling() else "",
    )  # fmt: skip
    return _text_of(
        recognized_formula, by_package=is_torch_kernel(active.policy.kernels.compiled_rules.match(facts).use[0])
    )


def _normalize(op: str, eps: float, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute a norm by a kernel of the policy's."""
    if weight is not None and weight.dtype != rows.dtype:
        weight, bias = weight.float(), None if bias is None else bias.float()
    shape = rows.shape[-1:]
    compiling = torch.compiler.is_compiling()
    same = weight is None or weight.dtype == rows.dtype
    cast = rows.dtype in HALVES and torch.is_autocast_enabled(rows.device.type)
    if op == "rms_norm" and same and not compiling and not cast:
        return functional.rms_norm(rows, shape, weight, eps)  # without Python where a fast kernel serves
    call: Any = torch.ops.xpuruntime if compiling else norm_autograd
    if op == "rms_norm":
        return call.rms_norm(rows, None, shape, weight, eps, "", phase_of_norm())[0]
    return call.layer_norm(rows, None, shape, weight, bias, eps, "", phase_of_norm())[0]


OVERRIDES = (
    Override(
        "forward",
        "rms_norm",
        (CLASSES,),
        functools.partial(AdaptedClasses, forward_of_linear, sharing),
        "",
        "norm_classes",
    ),
    Override(
        "forward", "rms_norm", (CLASSES,), functools.partial(AdaptedClasses, _own_forward, _adapter), "", "norm_classes"
    ),
)
