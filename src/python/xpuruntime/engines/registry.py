# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EngineRegistry`: which engines exist, by name and alias."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.engines.base import Engine

__all__ = ["EngineRegistry", "default_registry"]


class EngineRegistry:
    """Engines in order of preference. An ordinary object: make your own, or use `default_registry`."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._aliases: dict[str, str] = {}

    def register(self, engine: Engine) -> None:
        """Add an engine.

        Raises
        ------
        EngineError
            If its name or one of its aliases is already taken.
        """
        for word in (engine.name, *engine.aliases):
            if word in self._engines or word in self._aliases:
                msg = f"engine name {word!r} is already registered; choose another name for {type(engine).__qualname__}"
                raise EngineError(msg, engine=engine.name)
        self._engines[engine.name] = engine
        for alias in engine.aliases:
            self._aliases[alias] = engine.name

    def get(self, name: str) -> Engine:
        """Return the engine called `name` (or with that alias).

        Raises
        ------
        EngineError
            If there is none; the message names the nearest.
        """
        found = self._engines.get(self._aliases.get(name, name))
        if found is not None:
            return found
        words = [*self._engines, *self._aliases]
        near = difflib.get_close_matches(name, words, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        msg = f"unknown engine {name!r}{hint} Registered: {', '.join(sorted(self._engines))}"
        raise EngineError(msg, engine=name)

    def names(self) -> tuple[str, ...]:
        """Return the engine names in order of registration."""
        return tuple(self._engines)

    def engines(self) -> Mapping[str, Engine]:
        """Return name to engine, in order of registration."""
        return dict(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __contains__(self, name: object) -> bool:
        return name in self._engines or name in self._aliases


_default: EngineRegistry | None = None


def default_registry() -> EngineRegistry:
    """Return the process-wide registry with the engines of this package."""
    global _default
    if _default is None:
        from xpuruntime.engines.null import NullEngine
        from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine

        registry = EngineRegistry()
        registry.register(OnnxRuntimeEngine())
        registry.register(NullEngine())
        _default = registry
    return _default
