# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines of third parties, by the entry point group ``xpuruntime.engines``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from xpuruntime.engines.base import Engine
from xpuruntime.errors import EngineError
from xpuruntime.policies.device_spec import ENGINE_PATTERN
from xpuruntime.runtime.packages import load_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from xpuruntime.engines.registry import EngineRegistry

__all__ = ["GROUP", "register_plugins"]

#: Entry points of this group have the engine's name and point at its class, or at a function that returns it.
GROUP = "xpuruntime.engines"


def register_plugins(registry: EngineRegistry) -> list[str]:
    """Register the engines that installed packages name, in order of name, after those that are there."""

    def load(point: EntryPoint) -> None:
        engine = _make(point)
        if engine.name != point.name:
            msg = f"its entry point is called {point.name!r} and the engine {engine.name!r}; call both the same"
            raise EngineError(msg)
        registry.register(engine)

    return [f"the engine plugin {name} is left out: {reason}" for name, reason in load_points(GROUP, load)]


def _what(found: object) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"


def _make(point: EntryPoint) -> Engine:
    """Return the engine of an entry point."""
    import re

    found = point.load()
    if not isinstance(found, type) and not isinstance(found, Engine) and callable(found):
        found = found()
    if isinstance(found, type) and issubclass(found, Engine):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            msg = f"{found.__qualname__} lacks {missing}"
            raise EngineError(msg)
        found = found()
    if not isinstance(found, Engine):
        msg = (
            f"{point.value} is no engine but {_what(found)}; it must be a subclass of "
            "xpuruntime.engines.Engine, or a function that returns one"
        )
        raise EngineError(msg)
    for word in (getattr(found, "name", None), *found.aliases):
        if not isinstance(word, str) or not re.fullmatch(ENGINE_PATTERN, word) or word in ("auto", "error"):
            shown = repr(word) if isinstance(word, str) else f"an object of type {type(word).__name__}"
            msg = f"{shown} cannot be the name of an engine: letters, digits, '_' and '-', starting with a letter"
            raise EngineError(msg)
    return found
