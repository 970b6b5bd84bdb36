# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Classes of models that compute ``swiglu`` or ``geglu`` between their projections."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, AdaptedClasses, decides, is_usual, run_original
from xpuruntime.pytorch.adapters.norm_formulas import reads_of
from xpuruntime.pytorch.coverage.class_code import ACTIVATIONS, code_names, depends_on, hidden_inputs, projections_of
from xpuruntime.pytorch.dispatch.context import active_policy, in_clean_thread
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override
from xpuruntime.pytorch.providers.operations import geglu, swiglu
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["OVERRIDES"]

#: Name of the method by which experts of transformers compute the unit, of gate and input beside each other.
_GATE = "_apply_gate"
_UNKNOWN = "it is no product of SiLU or GELU of a gate with its input that this library knows"
_HOOKED = "its activation has hooks, which run around that module alone"
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
    """Return the forward that a class itself defines, where it takes one tensor and has the three projections."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or forward.__code__.co_argcount != 2 or kind.__module__[:6] == "torch.":
        return None
    return forward if projections_of(code_names(kind, forward)) else None


def _own_gate(kind: type) -> FunctionType | None:
    """Return the method of experts that a class itself defines, of gate and input beside each other."""
    gate = kind.__dict__.get(_GATE)
    return gate if isinstance(gate, FunctionType) and gate.__code__.co_argcount == 2 else None


def _adapter(original: FunctionType) -> Callable[..., Any]:
    def form(kind: Any, activation: Any, approximate: Any, training: bool) -> str:
        return _form_of(original, kind, activation, approximate, training)

    def projections(kind: Any) -> tuple[str, ...]:
        return projections_of(code_names(kind, original))

    for constant in (form, projections):
        _private_api.mark_constant(constant)

    # Traced by Dynamo: nothing but what it can follow, and functions that it takes for constants.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        if len(operands) != 1 or not isinstance(operands[0], torch.Tensor):
            return original(self, *args, **kwargs)
        x = operands[0]
        activation = None
        for name in ACTIVATIONS:
            if activation is None:
                activation = getattr(self, name, None)
        approximate = getattr(activation, "approximate", None)
        hooked = False
        if isinstance(activation, torch.nn.Module):
            hooked = _private_api.has_hooks(activation)
            activation = type(activation)
        text = form(type(self), activation, approximate, self.training)
        if text == "":
            return original(self, x)
        op, _, choice = text.removeprefix("!").partition(" ")
        if text[0] == "!" or hooked:
            if torch.compiler.is_compiling():
                return original(self, x)
            why = _HOOKED if text[0] != "!" else _UNKNOWN
            return run_original(op, type(self), original, (self, x), x, why)
        if not torch.compiler.is_compiling():
            if not decides(op, x):
                return original(self, x)
            if not is_usual(x):
                return run_original(op, type(self), original, (self, x), x, UNUSUAL)
        names = projections(type(self))
        if len(names) == 3:
            gate, up = getattr(self, names[0])(x), getattr(self, names[1])(x)
        else:
            gate, up = (getattr(self, names[0])(x) if len(names) > 0 else x).chunk(2, dim=-1)
        attributes = {"approximate": choice} if choice != "" else {}
        out = perform(op, {"gate": gate, "up": up}, attributes)
        return getattr(self, names[-1])(out) if len(names) > 0 else out

    return forward


def _form_of(original: FunctionType, kind: Any, activation: Any, approximate: Any, training: bool) -> str:
    """Return what a class computes where the active policy decides that; after ``!`` where it does so in its own way.

    The policy that holds is part of the key of compiled code; see `compile_hooks`.
    """
    active = active_policy()
    if active is None or torch.compiler.is_exporting():
        return ""
    key = (original, activation, approximate, training)
    with _lock:
        known = _known.setdefault(kind, {})
        if key not in known:
            known[key] = in_clean_thread(_recognize, original, kind, activation, approximate, training)
        text = known[key]
    return text if text.partition(" ")[0].removeprefix("!") in active.ops else ""


def _recognize(original: Any, kind: Any, activation: Any, approximate: Any, training: bool) -> str:
    """Run the forward of a class with small projections, and compare the bits with each form."""
    named = code_names(kind, original)
    names = projections_of(named)
    x = torch.sin(torch.arange(32.0, device="cpu") ** 2).view(1, 4, 8) * 3
    alone = not depends_on(kind, original, {*_NAMES, *names, *ACTIVATIONS})
    if isinstance(activation, type) and activation.__module__ not in _ACTIVATIONS:
        of_activation: Any = inspect.getattr_static(activation, "forward")
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
            ones = torch.ones_like(x)
            op = next((text for text, form in _FORMS.items() if torch.equal(form(x, ones), function(x))), "")
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


def _linear(columns: int, rows: int, phase: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(columns, rows, device="meta", dtype=torch.float32).to_empty(device="cpu")
    for parameter in layer.parameters():
        count = torch.arange(parameter.numel(), dtype=torch.float32, device="cpu")
        parameter.copy_(torch.cos(count * count * 0.13 + phase).view_as(parameter))
    return layer


#: One adapter of a class for both operations: policies of several threads may decide one each.
OVERRIDES = tuple(
    Override(name, "swiglu", (CLASSES,), functools.partial(AdaptedClasses, own, _adapter), group="gated_units")
    for name, own in (("forward", _own_forward), (_GATE, _own_gate))
)
