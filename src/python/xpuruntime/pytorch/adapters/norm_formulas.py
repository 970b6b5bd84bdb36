# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Formulas of norms, and the probe that recognizes them in the forward of a class by comparing bits.

A class that computes a norm by elementwise operators says nowhere which of the formulas in use it has: where it rounds,
whether it adds one to its weight, where a gate comes in. The probe runs its own forward on a few small rows, with the
attributes of the instance, and compares the result with each formula.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch.coverage.class_code import code_constants, code_names, hidden_inputs
from xpuruntime.pytorch.dispatch.context import in_clean_thread

if TYPE_CHECKING:
    from torch import Tensor

    #: Returns the norm of rows, times a weight, plus a bias, rounded to the type of the rows.
    Normalize = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

_PLAIN = (bool, int, float, str)
#: Columns of a norm without a weight where nothing says how many there are.
_COLUMNS = 64
HALVES = (torch.float16, torch.bfloat16)
#: Values that tell formulas apart which differ in where they round.
_LEAST = 256


class Formula(NamedTuple):
    """How a class computes a norm."""

    op: str
    scale: str
    gate: str = ""
    activation: str = ""
    group_size: int = 0


class NormState(NamedTuple):
    """What the forward of an instance depends on, all of it constants."""

    attributes: tuple[tuple[str, Any], ...]
    parameters: tuple[tuple[str, torch.dtype], ...]
    constants: tuple[float, ...] = ()


#: In the order in which they are compared: where several give the same bits, the first has the least to do.
FORMULAS = (
    *(Formula("rms_norm", scale) for scale in ("inside", "plus_one", "after", "widest", "none")),
    *(
        Formula("rms_norm", scale, gate, activation)
        for gate in ("before", "after")
        for scale in ("inside", "after")
        for activation in ("silu", "sigmoid")
    ),
    *(Formula("layer_norm", scale) for scale in ("inside", "after", "none")),
)


def compute(
    formula: Formula, normalize: Normalize, x: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None
) -> Tensor:
    """Return what a class of this formula does, with the norm itself by `normalize`."""
    dtype = x.dtype
    rows = x
    if formula.gate == "before" and gate is not None:
        rows = x.float() * _activate(formula, gate)
    elif formula.gate == "after" and formula.scale == "inside":
        rows = x.float()
    if formula.group_size:
        rows = rows.unflatten(-1, (-1, formula.group_size))
        if weight is not None and formula.scale != "after":
            rows, weight = rows.float(), weight.float()
            weight = 1.0 + weight if formula.scale == "plus_one" else weight
            out = normalize(rows, None, None).flatten(-2)
            return (out if formula.scale == "none" else out * weight).to(dtype)
        out = normalize(rows, None, None).flatten(-2).to(dtype)
        return out if weight is None else weight * out
    if formula.scale == "none" or weight is None:
        return normalize(rows, None, None).to(dtype)
    if formula.scale == "inside":
        out = normalize(rows, weight, bias)
    elif formula.scale == "plus_one":
        out = normalize(rows, 1.0 + weight.float(), None)
    elif formula.scale == "widest" and weight.dtype != dtype:
        normal = normalize(rows.float(), None, None)
        return weight * (normal.to(weight.dtype) if weight.dtype in HALVES else normal)
    else:
        out = weight * normalize(rows, None, None).to(dtype)
        out = out if bias is None else out + bias
        if formula.gate != "after":
            return out
    return (out * _activate(formula, gate) if formula.gate == "after" else out).to(dtype)


def _activate(formula: Formula, gate: Any) -> Tensor:
    gate = gate.to(torch.float32)
    return torch.nn.functional.silu(gate) if formula.activation == "silu" else torch.sigmoid(gate)


def recognize(
    kind: type[torch.nn.Module],
    forward: Callable[..., Any],
    state: NormState,
    dtype: torch.dtype,
    columns: int,
    dims: int,
    *,
    gated: bool,
) -> tuple[Formula, float] | None:
    """Return the formula of a class and its epsilon, or ``None`` where it is none of those known."""
    if dtype not in (torch.float32, *HALVES) or columns < 1 or dims < 1:
        return None
    return in_clean_thread(_recognize, kind, forward, state, dtype, columns, dims, gated=gated)


def _recognize(
    kind: Any, forward: Any, state: NormState, dtype: torch.dtype, columns: int, dims: int, *, gated: bool
) -> tuple[Formula, float] | None:
    parameters = {name: _columns(columns, at).to(dtype) for at, (name, dtype) in enumerate(state.parameters)}
    weight, bias = (*parameters.values(), None, None)[:2]
    if len(parameters) > 2 or (bias is not None and list(parameters)[1] != "bias"):
        return None
    if hidden_inputs(kind, forward):
        return None
    sizes = (1.0, 30.0, 2e-3, 0.0) * max(1, _LEAST // columns)
    rows = torch.stack([_columns(columns, at) * size for at, size in enumerate(sizes)])
    for axis in range(dims - 2):  # other rows beside each, so that a mean over more than the columns differs
        rows = torch.stack([rows, rows.roll(1 + axis % 3, -2)])
    x = (rows if dims > 1 else rows[2]).to(dtype)
    gate = x.flip(-1).contiguous() if gated else None
    try:
        seen = forward(_instance(kind, state, parameters), x.clone(), *([] if gate is None else [gate.clone()]))
    except Exception:
        return None
    if not isinstance(seen, torch.Tensor) or seen.shape != x.shape:
        return None
    groups = [value for name, value in state.attributes if name == "group_size" and type(value) is int and value > 0]
    for eps in (*(value for _, value in state.attributes if type(value) is float), *state.constants):
        for formula in FORMULAS:
            if bool(formula.gate) != gated or (formula.scale == "none") != (weight is None):
                continue
            for group_size in (0, *groups):
                known = formula._replace(group_size=group_size)
                if any(_equal(known, way, seen, x, weight, bias, gate, eps) for way in _WAYS):
                    return known, eps
    return None


def _equal(formula: Formula, way: Any, seen: Tensor, x: Tensor, weight: Any, bias: Any, gate: Any, eps: float) -> bool:
    def normalize(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        wide = rows.float()
        if formula.op == "layer_norm":
            wide = wide - wide.mean(-1, keepdim=True)
        out = way(wide, wide.pow(2).mean(-1, keepdim=True) + eps)
        out = out if weight is None else out * weight.float()
        return (out if bias is None else out + bias.float()).to(rows.dtype)

    try:
        computed = compute(formula, normalize, x, weight, bias, gate)
    except RuntimeError:  # a size of groups that does not divide the columns
        return False
    return bool(computed.dtype == seen.dtype and torch.equal(computed, seen))


#: How classes divide by the root of what they have computed: all round to the same in halves, and differ in float32.
_WAYS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda rows, mean: rows * torch.rsqrt(mean),
    lambda rows, mean: rows * torch.pow(mean, -0.5),
    lambda rows, mean: rows / torch.sqrt(mean),
)


def _columns(columns: int, at: int) -> Tensor:
    """Return numbers around one without a pattern, the same in each process; nothing is drawn."""
    count = torch.arange(1, columns + 1, dtype=torch.float64, device="cpu")
    return (torch.sin(count * count * (0.37 + 0.11 * at)) * 1.7 + 0.3).float()


def _instance(kind: Any, state: NormState, parameters: dict[str, Tensor]) -> torch.nn.Module:
    instance: torch.nn.Module = kind.__new__(kind)
    torch.nn.Module.__init__(instance)
    for name, value in state.attributes:
        if value is not None or not hasattr(instance, name):
            setattr(instance, name, value)
    for name, parameter in parameters.items():
        instance.register_parameter(name, torch.nn.Parameter(parameter, requires_grad=False))
    return instance


_lock = threading.RLock()
#: Class of an instance to what was recognized of it, by the forward, the state, and what else a call depends on.
_known: weakref.WeakKeyDictionary[type, dict[Any, tuple[Formula, float] | None]] = weakref.WeakKeyDictionary()


def read(module: Any, names: tuple[str, ...], x: Any) -> Any:
    """Return attributes of an instance, its parameters, and whether a formula for the rows of `x` may have them all."""
    attributes: list[tuple[str, Any]] = []
    parameters: list[tuple[str, Tensor]] = []
    plain = True
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, torch.Tensor):
            parameters.append((name, value))
            plain = plain and value.dim() == 1 and value.shape[0] == x.shape[-1]
        elif value is None or isinstance(value, _PLAIN):
            attributes.append((name, value))
        else:
            plain = False
    return tuple(attributes), parameters, plain


def facts_of(module: torch.nn.Module, names: tuple[str, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return what `read` finds as a key for eager calls, and the parameters, which lie in the instance as a rule."""
    own = module.__dict__
    stored = own["_parameters"]
    facts: list[Any] = []
    parameters: list[Tensor] = []
    for name in names:
        value = own[name] if name in own else stored[name] if name in stored else getattr(module, name, None)
        if isinstance(value, torch.Tensor):
            facts.append((value.dtype, value.shape))
            parameters.append(value)
        else:
            facts.append(value if value is None or isinstance(value, _PLAIN) else _PLAIN)
    return tuple(facts), parameters


@functools.lru_cache(maxsize=4096)
def reads_of(kind: Any, original: FunctionType) -> tuple[str, ...]:
    """Return the names of what the forward of a class may read of an instance; those of parameters come first."""
    stored = {"weight", "bias"}
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        stored |= {name for name, value in vars(base).items() if isinstance(value, _PLAIN)}
        for method in (var for var in vars(base).values() if isinstance(var, FunctionType)):
            stored |= {step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR"}
    taken = {name for name in code_names(kind, original) & stored if not callable(getattr(kind, name, None))}
    return tuple(sorted(taken, key=lambda name: (name not in ("weight", "bias"), name == "bias", name)))


def recognized(
    original: FunctionType,
    kind: type[torch.nn.Module],
    attributes: Any,
    types: Any,
    dtype: torch.dtype,
    columns: int,
    dims: int,
    gated: bool,
) -> tuple[Formula, float] | None:
    """Return the formula of a call and its epsilon, found once."""
    key = (original, attributes, types, dtype, columns, dims, gated)
    with _lock:
        known = _known.setdefault(kind, {})
        if key not in known:
            constants = code_constants(kind, original)  # type: ignore[arg-type]
            state = NormState(attributes, types, constants)
            known[key] = recognize(kind, original, state, dtype, columns, dims, gated=gated)
        return known[key]


def formula_of_module(module: torch.nn.Module) -> Formula | None:
    """Return the formula of a module in the type of its weight, or in float32; ``None`` where it is not recognized."""
    kind = type(module)
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), kind)
    original = inspect.unwrap(vars(owner).get("forward", len))
    if not isinstance(original, FunctionType):
        return None
    names = reads_of(kind, original)  # type: ignore[arg-type]
    like = next(
        (tensor for tensor in (getattr(module, name, None) for name in names) if isinstance(tensor, torch.Tensor)), None
    )
    like = torch.empty(_COLUMNS) if like is None else like
    attributes, parameters, plain = read(module, names, like)
    if not plain:
        return None
    types = tuple((name, value.dtype) for name, value in parameters)
    dtype, columns = like.dtype, like.shape[-1]
    for gated in (False, True):
        recognized_formula = recognized(original, kind, attributes, types, dtype, columns, 3, gated)
        if recognized_formula is not None:
            return recognized_formula[0]
    return None
