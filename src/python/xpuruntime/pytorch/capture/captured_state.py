# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CapturedState`: the modules, optimizers, scalers and generators that a function works on."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["CapturedState", "captured_state_of"]

#: How far from the function it is looked: a function, its object, a container in it, what that holds.
_DEPTH = 5
#: Containers longer than this are data.
_LONGEST = 256
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


@dataclass
class CapturedState:
    """What a function works on, each once, in the order in which it was found."""

    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)

    def add(self, value: Any) -> bool:
        """Keep a value of one of the four kinds, and say whether it was of one."""
        for kind, kept in (
            (torch.nn.Module, self.modules),
            (torch.optim.Optimizer, self.optimizers),
            (torch.amp.GradScaler, self.scalers),
            (torch.Generator, self.generators),
        ):
            if isinstance(value, kind):
                if not any(value is known for known in kept):
                    kept.append(value)
                return True
        return False

    def all_modules(self) -> list[Any]:
        """Return the modules and all inside them, each once."""
        return _once(inner for module in self.modules for inner in module.modules())

    def tensors(self) -> list[Any]:
        """Return parameters and buffers of the modules and parameters of the optimizers, each once."""
        return _once([*self.parameters(), *(buffer for module in self.modules for buffer in module.buffers())])

    def parameters(self) -> list[Any]:
        """Return the parameters of the modules and the optimizers, each once."""
        own = [parameter for module in self.modules for parameter in module.parameters()]
        return _once([*own, *(p for optimizer in self.optimizers for p in parameters_of(optimizer))])

    def unexplained(self) -> int:
        """Return how many parameters of the optimizers belong to no module that was found."""
        known = {id(parameter) for module in self.modules for parameter in module.parameters()}
        return sum(id(p) not in known for optimizer in self.optimizers for p in parameters_of(optimizer))


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def captured_state_of(fn: Callable[..., Any]) -> CapturedState:
    """Return what `fn` works on, as far as it can be seen without running it.

    Looked at are what the function closes over, its defaults, the globals that it names, its object's attributes,
    arguments of a `functools.partial`, and containers and objects in all of them.
    """
    used = CapturedState()
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, (*_PLAIN, torch.Tensor)) or id(value) in seen:
            return
        seen.add(id(value))
        if used.add(value) or depth == 0:
            return
        for inner in _inside(value):
            look(inner, depth - 1)

    look(fn, _DEPTH)
    return used


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return _inside_function(value)
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONGEST else []
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value) if len(value) <= _LONGEST else []
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", "builtins"):
        return []
    attributes = getattr(value, "__dict__", None)
    own = list(attributes.values()) if isinstance(attributes, dict) else []
    return [*own, type(value).__call__] if callable(value) else own


def _inside_function(function: types.FunctionType) -> list[Any]:
    if function.__module__ and function.__module__.partition(".")[0] == "torch":
        # What torch.compile returns keeps the function that it was given.
        return [_private_api.compiled_function(function), getattr(function, "__wrapped__", None)]
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    found += [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    found += [_private_api.compiled_function(function), getattr(function, "__wrapped__", None)]
    return found


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return names


def _once(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())
