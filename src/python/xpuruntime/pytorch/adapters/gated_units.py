# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Classes of models that compute ``swiglu`` or ``geglu`` between their projections."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import (
    UNUSUAL,
    AdaptedClasses,
    decides,
    is_usual,
    own_call,
    report_compiled,
    run_original,
)
from xpuruntime.pytorch.adapters.norm_formulas import reads_of
from xpuruntime.pytorch.coverage.class_code import (
    ACTIVATIONS,
    code_names,
    depends_on,
    hidden_inputs,
    multiplies_activation,
    projections_of,
)
from xpuruntime.pytorch.coverage.operation_table import norm_by_operators
from xpuruntime.pytorch.dispatch.context import active_policy, in_clean_thread
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override
from xpuruntime.pytorch.providers.operations import geglu, swiglu
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from torch import Tensor

#: Name of the method by which experts of transformers compute the unit, of gate and input beside each other.
_GATE = "_apply_gate"
_UNKNOWN = "it is no product of SiLU or GELU of a gate with its input that this library knows"
_INSIDE = "its gated unit is inside of more that it computes, or of a form that this library does not know"
_HOOKED = "its activation has hooks or a forward of its own, which run in that module alone"
#: What the code of a unit may name beside its projections and its activation. What else it names could decide, for
#: another instance or other numbers than those of the probe, what it computes.
_NAMES = frozenset(("torch", "nn", "functional", "F", "silu", "gelu", "chunk", "to", "dtype", "float", "type_as"))
#: Modules of activations whose state is what they are made with, by default but for `approximate`.
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_lock = threading.RLock()
_known: weakref.WeakKeyDictionary[type, dict[Any, str]] = weakref.WeakKeyDictionary()


#: What a class computes as text, which Dynamo takes for a constant: the operation, and its attribute.
_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu none": geglu,
    "geglu tanh": functools.partial(geglu, approximate="tanh"),
}


def _own_forward(kind: type) -> FunctionType | None:
    forward = kind.__dict__.get("forward")
    return forward if isinstance(forward, FunctionType) and _is_unit(kind, forward) else None


def _is_unit(kind: type, forward: FunctionType) -> bool:
    takes_one = forward.__code__.co_argcount == 2 and kind.__module__[:6] != "torch."
    return takes_one and bool(projections_of(code_names(kind, forward)))


def _own_gate(kind: type) -> FunctionType | None:
    gate = kind.__dict__.get(_GATE)
    return gate if isinstance(gate, FunctionType) and gate.__code__.co_argcount == 2 else None


def _other_forward(kind: type) -> FunctionType | None:
    """Return the forward of a class of transformers with a gated unit inside that no kernel can stand in for."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or not kind.__module__.startswith("transformers.models."):
        return None
    own = inspect.unwrap(forward)
    named = code_names(kind, own)
    if not named & {*ACTIVATIONS, "silu", "gelu"} or _is_unit(kind, own) or norm_by_operators(kind, own):
        return None
    return forward if multiplies_activation(own) else None


def _reporting(original: FunctionType) -> Callable[..., Any]:
    """Return a forward that says what no kernel can stand in for, and refuses it where the policy is strict."""

    def form(kind: Any, *facts: Any) -> str:
        return _form_of(inspect.unwrap(original), kind, *facts)

    _private_api.mark_constant(form)

    # Traced by Dynamo: nothing but what it can follow, and functions that it takes for constants.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        text = ""
        if len(args) > 0 and isinstance(args[0], torch.Tensor) and not _calls_gate(self):
            text = form(type(self), *_facts_of(self))
        if text == "":
            return original(self, *args, **kwargs)
        op = text.removeprefix("!").partition(" ")[0]
        if torch.compiler.is_compiling():
            report_compiled(op, type(self), args[0].dtype, args[0].device, _INSIDE)
        elif decides(op, args[0]):
            run = functools.partial(original, **kwargs)
            return run_original(op, type(self), run, (self, *args), args[0], _INSIDE)
        return original(self, *args, **kwargs)

    return forward


def _calls_gate(module: Any) -> bool:
    """Say whether experts run by the method for their gate, which has an adapter of its own."""
    words = getattr(module, "config", None)
    return hasattr(module, _GATE) and getattr(words, "_experts_implementation", None) not in (None, "eager")


def _facts_of(module: Any) -> tuple[Any, ...]:
    activation = None
    for name in ACTIVATIONS:
        if activation is None:
            activation = getattr(module, name, None)
    facts = (getattr(activation, "approximate", None), getattr(activation, "act", None), module.training)
    if isinstance(activation, torch.nn.Module):
        activation = type(activation)
    return (activation, getattr(activation, "forward", None), *facts)


def _adapter(original: FunctionType) -> Callable[..., Any]:
    def form(*facts: Any) -> str:
        return _form_of(original, *facts)

    def projections(kind: Any) -> tuple[str, ...]:
        return projections_of(code_names(kind, original))

    for constant in (form, projections, _others_hook):
        _private_api.mark_constant(constant)

    def eagerly(self: Any, x: Tensor) -> Any:
        active = active_policy()
        key, own = own_call("swiglu", (original, id(self)), x)
        if own:
            return original(self, x)
        if active is None or not ("swiglu" in active.ops or "geglu" in active.ops):
            return original(self, x)
        kind, (facts, activations) = type(self), _eager_facts_of(self)
        known = (original, kind, facts)
        text = active.adapted_calls.get(known)
        if text is None:
            text = active.keep_adapted(known, form(kind, *facts))
        op, _, choice = text.removeprefix("!").partition(" ")
        if op == "" or not decides(op, x):
            return original(self, x)
        hooked = any(map(_private_api.has_hooks, activations)) or (len(activations) > 0 and _others_hook())
        if text[0] == "!" or hooked or not is_usual(x):
            why = _UNKNOWN if text[0] == "!" else _HOOKED if hooked else UNUSUAL
            return run_original(op, kind, original, (self, x), x, why)
        return computed(self, x, op, choice, key)

    # Traced by Dynamo, as `forward` is: nothing but what it can follow, and functions that it takes for constants.
    def computed(self: Any, x: Tensor, op: str, choice: str, own: Any = None) -> Any:
        names = projections(type(self))
        if len(names) == 3:
            gate, up = getattr(self, names[0])(x), getattr(self, names[1])(x)
        else:
            gate, up = (getattr(self, names[0])(x) if len(names) > 0 else x).chunk(2, dim=-1)
        out = perform(op, {"gate": gate, "up": up}, {"approximate": choice} if choice != "" else {}, own=own)
        return getattr(self, names[-1])(out) if len(names) > 0 else out

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        if len(operands) != 1 or not isinstance(operands[0], torch.Tensor):
            return original(self, *args, **kwargs)
        x = operands[0]
        if not torch.compiler.is_compiling():
            return eagerly(self, x)
        text = form(type(self), *_facts_of(self))
        if text == "":
            return original(self, x)
        hooked = False
        for name in ACTIVATIONS:
            activation = getattr(self, name, None)
            if isinstance(activation, torch.nn.Module):
                hooked = hooked or _private_api.has_hooks(activation) or _others_hook()
        op, _, choice = text.removeprefix("!").partition(" ")
        if text[0] == "!" or hooked:
            report_compiled(op, type(self), x.dtype, x.device, _HOOKED if text[0] != "!" else _UNKNOWN)
            return original(self, x)
        return computed(self, x, op, choice)

    return forward


def _eager_facts_of(module: torch.nn.Module) -> tuple[tuple[Any, ...], list[torch.nn.Module]]:
    """Return what `_facts_of` does, and the activations that are modules, and asks for no attribute that is missing."""
    found: Any = None
    modules: list[torch.nn.Module] = []
    for name in ACTIVATIONS:
        value = _stated(module, name)
        found = value if found is None else found
        if isinstance(value, torch.nn.Module):
            modules.append(value)
    of = _stated if isinstance(found, torch.nn.Module) else _attribute
    facts = (of(found, "approximate"), of(found, "act"), module.training)
    if isinstance(found, torch.nn.Module):
        found = type(found)
    return (found, _attribute(found, "forward"), *facts), modules


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _stated(module: torch.nn.Module, name: str) -> Any:
    """Return an attribute of a module; ``None`` where it has none, for which PyTorch would look long."""
    own = module.__dict__
    if name in own:
        return own[name]
    if name in own["_modules"]:
        return own["_modules"][name]
    return getattr(module, name, None) if hasattr(type(module), name) else None


def _others_hook() -> bool:
    """Say whether another library has hooks around all modules, which would not run around an activation."""
    return any(not hook.__module__.startswith("xpuruntime.") for hook in _private_api.global_module_hooks())


def _form_of(original: FunctionType, kind: Any, *facts: Any) -> str:
    # Return what a class computes where the active policy decides that; after ``!`` where it does so in its own way.
    # The policy that holds is part of the key of compiled code; see `compile_hooks`.
    active = active_policy()
    if active is None or torch.compiler.is_exporting():
        return ""
    key = (original, *facts)
    with _lock:
        known = _known.setdefault(kind, {})
        if key not in known:
            known[key] = in_clean_thread(_recognize, original, kind, *facts)
        text = known[key]
    return text if text.partition(" ")[0].removeprefix("!") in active.ops else ""


def _recognize(
    original: Any, kind: Any, activation: Any, of_activation: Any, approximate: Any, inner: Any, training: bool
) -> str:
    """Run the forward of a class with small projections, and compare the bits with each form."""
    named = code_names(kind, original)
    names = projections_of(named)
    x = torch.sin(torch.arange(32.0, device="cpu") ** 2).view(1, 4, 8) * 3
    alone = not depends_on(kind, original, {*_NAMES, *names, *ACTIVATIONS})
    if not isinstance(activation, type):
        alone = alone and (activation is None or _is_plain(activation))
    elif activation.__module__ not in _ACTIVATIONS or of_activation.__module__ not in _ACTIVATIONS:
        alone = alone and not reads_of(activation, of_activation) and not hidden_inputs(activation, of_activation)
    op = "swiglu" if "silu" in named else "geglu" if "gelu" in named else ""
    try:
        instance = kind.__new__(kind)
        torch.nn.Module.__init__(instance)
        instance.train(training)
        sizes = {0: (), 2: ((8, 48), (24, 8)), 3: ((8, 24), (8, 24), (24, 8))}[len(names)]
        for at, (name, (columns, rows)) in enumerate(zip(names, sizes, strict=True)):
            setattr(instance, name, _linear(columns, rows, at))
        if activation is not None:
            options = {} if approximate is None else {"approximate": approximate}
            function = activation(**options) if isinstance(activation, type) else activation
            if inner is not None and function is not activation:
                alone, function.act = alone and _is_plain(inner), inner
            value, ones = function(x), torch.ones_like(x)
            op = next((text for text, form in _FORMS.items() if torch.allclose(form(x, ones), value, 1e-5, 1e-6)), "")
            for name in ACTIVATIONS:
                setattr(instance, name, function)
        seen = original(instance, x.clone())
    except Exception:
        seen = None
    if alone and isinstance(seen, torch.Tensor):
        *into, down = (getattr(instance, name) for name in names) if names else (torch.nn.Identity(),)
        gate, up = [layer(x) for layer in into] if len(into) == 2 else (into[0](x) if into else x).chunk(2, dim=-1)
        for text, form in _FORMS.items():
            if torch.equal(seen, down(form(gate, up))):
                return text
    return f"!{op.partition(' ')[0]}" if op else ""


def _is_plain(function: Any) -> bool:
    """Say whether a function is one of PyTorch's, or that with some arguments: it reads nothing that may change."""
    inner = function.func if isinstance(function, functools.partial) else function
    return isinstance(inner, BuiltinFunctionType) or getattr(inner, "__module__", "").partition(".")[0] == "torch"


def _linear(columns: int, rows: int, phase: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(columns, rows, device="meta", dtype=torch.float32).to_empty(device="cpu")
    for parameter in layer.parameters():
        count = torch.arange(parameter.numel(), dtype=torch.float32, device="cpu")
        parameter.copy_(torch.cos(count * count * 0.13 + phase).view_as(parameter))
    return layer


#: One adapter of a class for both operations: policies of several threads may decide one each.
OVERRIDES = tuple(
    Override(name, "swiglu", (CLASSES,), functools.partial(AdaptedClasses, own, adapter), group="gated_units")
    for name, own, adapter in (
        ("forward", _own_forward, _adapter),
        (_GATE, _own_gate, _adapter),
        ("forward", _other_forward, _reporting),
    )
)
