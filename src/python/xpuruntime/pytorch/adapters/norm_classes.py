# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Norms of model classes: their forward goes to the kernels of a policy while one decides norms, and is restored after.

A class is adapted by its code, before anything is known of its instances; what a call computes is recognized from the
instance, by its bits. A call that is not recognized, or that no policy speaks of, runs the forward of the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from xpuruntime.ops.torch_kernels import is_torch_kernel
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, AdaptedClasses, is_usual
from xpuruntime.pytorch.adapters.norm_formulas import HALVES, Formula, compute, facts_of, read, reads_of, recognized
from xpuruntime.pytorch.adapters.shared_casts import forward_of_linear, offer, sharing
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.coverage.gaps import CoverageGap, report_gaps
from xpuruntime.pytorch.coverage.operation_table import norm_by_operators, title_of
from xpuruntime.pytorch.dispatch.context import DTYPES, active_policy
from xpuruntime.pytorch.dispatch.overrides import traced_norms
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override, call_native
from xpuruntime.pytorch.dispatch.route import Route, facts_of_call
from xpuruntime.pytorch.ops import norm_autograd
from xpuruntime.pytorch.ops.norms import phase_of_norm
from xpuruntime.pytorch.providers.bound import BoundKernel
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

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

    def eagerly(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = _operands(names, args, kwargs)
        x = operands[0] if operands else None
        active = active_policy()
        decided = active is not None and ("rms_norm" in active.ops or "layer_norm" in active.ops)
        if active is None or not decided or not isinstance(x, torch.Tensor) or not (x.dim() and x.numel()):
            return original(self, *args, **kwargs)
        gate = operands[1] if len(operands) > 1 else None
        facts, tensors = facts_of(self, reads(type(self)))
        usual = is_usual(x, *tensors)
        key = (
            original, type(self), facts, x.dtype, x.device, x.shape[-1], x.dim(), type(gate), usual,
            *active.call_context(),
        )  # fmt: skip
        plan = active.adapted_calls.get(key)
        if plan is None:
            plan = active.keep_adapted(key, _plan_of(active, original, self, reads(type(self)), x, gate, usual))
        if plan.run is not None:
            out = plan.run(x, *(*tensors, None, None)[:2], gate)
            offer(out)
            return out
        if plan.route is None:
            return original(self, *args, **kwargs)
        return call_native(f"nn::{type(self).__name__}", plan.route.op, original, (self, *args), kwargs, plan.route)

    # Traced by Dynamo: nothing but what it can follow, and functions that it takes for constants.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return eagerly(self, args, kwargs)
        operands = _operands(names, args, kwargs)
        x = operands[0] if len(operands) > 0 else None
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            return original(self, *args, **kwargs)
        gate = operands[1] if len(operands) > 1 else None
        attributes, parameters, plain = read(self, reads(type(self)), x)
        plain = plain and (gate is None or isinstance(gate, torch.Tensor))
        types = tuple([(name, value.dtype) for name, value in parameters])
        columns = x.shape[-1] if plain else 0
        text = traced(type(self), attributes, types, x.dtype, x.device, columns, x.dim(), gate is not None)
        if text == "":
            return original(self, *args, **kwargs)
        weight = parameters[0][1] if len(parameters) > 0 else None
        bias = parameters[1][1] if len(parameters) > 1 else None
        return _kernel_of(text)(x, weight, bias, gate)

    return forward


def _operands(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the operands of a call in their order; none of one that is for the class itself to refuse or to take."""
    if len(kwargs) == 0:
        return args if len(args) <= len(names) else ()
    operands = (*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs])
    return operands if len(operands) == len(args) + len(kwargs) and len(operands) <= len(names) else ()


def _kernel_of(text: str) -> Callable[..., Tensor]:
    """Return what computes a formula, as text, of rows, a weight, a bias and a gate: the norm itself by a kernel."""
    op, scale, gate_order, activation, group_size, eps, form = text.split(" ")
    if form != "":
        stated = {"epsilon": float(eps), "formula": form}
        return lambda x, weight, *_: perform(op, {"x": x, "weight": weight}, stated)
    formula = Formula(op, scale, gate_order, activation, int(group_size))
    return functools.partial(compute, formula, functools.partial(_normalize, op, float(eps)))


class _Plan(NamedTuple):
    """What eager calls of one kind do: the forward of the class by a route, or without one, or a kernel."""

    route: Route | None
    run: Callable[..., Tensor] | None = None


def _plan_of(
    active: CompiledPolicy,
    original: FunctionType,
    module: Any,
    names: tuple[str, ...],
    x: Tensor,
    gate: Any,
    usual: bool,
) -> _Plan:
    kind, dtype, device = type(module), x.dtype, x.device
    if device.type not in _DEVICES:
        return _Plan(None)
    attributes, parameters, plain = read(module, names, x)
    plain = plain and (gate is None or isinstance(gate, torch.Tensor))
    types = tuple([(name, value.dtype) for name, value in parameters])
    columns = x.shape[-1] if plain else 0
    recognized_formula = None
    if usual:
        recognized_formula = recognized(original, kind, attributes, types, dtype, columns, x.dim(), gate is not None)
    op = str(norm_by_operators(kind, original)) if recognized_formula is None else recognized_formula[0].op
    if op not in active.ops:
        return _Plan(None)
    phase, module_path = active.call_context()
    why = "" if recognized_formula is not None else _UNKNOWN if usual else UNUSUAL
    route = active.resolve(
        ("class", original, attributes, types, dtype, device, columns, x.dim(), gate is None, phase, module_path, why),
        facts_of_call(op, device=device, dtype=dtype, phase=phase, module=module_path, sizes={}),
        description=f"{title_of(kind)} of {list(x.shape)} {DTYPES.get(dtype, dtype)} on {device}",
        unsupported_reason=why,
    )  # fmt: skip
    if recognized_formula is None or (route.native and not route.open):
        return _Plan(route)
    _note(active, kind, recognized_formula[0])
    text = _text_of(recognized_formula, by_package=isinstance(route.place, BoundKernel))
    return _Plan(None, _kernel_of(text))


def _text_of(recognized_formula: tuple[Formula, float], *, by_package: bool) -> str:
    """Return a formula as text, which Dynamo takes for a constant."""
    # The kernels of other packages have names for what the class does around the norm, and do it, too.
    formula, eps = recognized_formula
    alone = by_package and not formula.gate and not formula.group_size and formula.op == "rms_norm"
    form = _FORMS.get(formula.scale, "") if alone else ""
    return " ".join((*map(str, formula), repr(eps), form))


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
    # Return the formula of a call that is being compiled, where the policy asks for a kernel; else Inductor fuses it.
    # The policy that holds is part of the key of compiled code; see `compile_hooks`.
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
