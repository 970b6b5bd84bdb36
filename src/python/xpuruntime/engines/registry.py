# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EngineRegistry`: which engines exist, by name and alias."""

from __future__ import annotations

import difflib
import importlib
import threading
import warnings
from typing import TYPE_CHECKING

from xpuruntime.argument_types import REGISTRY, check_types
from xpuruntime.errors import EngineError, EngineUnavailable, XpuRuntimeWarning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.engines.base import Engine

__all__ = ["EngineRegistry", "default_registry", "known_engines"]


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
                taken = type(self._engines[self._aliases.get(word, word)])
                msg = (
                    f"engine name {word!r} is already registered, by {taken.__module__}.{taken.__qualname__}; choose "
                    f"another name for {type(engine).__qualname__}"
                )
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
        raise EngineUnavailable(msg, engine=name)

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


#: Module and class of each engine of this package, in the order in which ``engine: auto`` tries them. None of the
#: modules imports a vendor's package.
_BUILTIN = (
    ("xpuruntime.engines.onnxruntime", "OnnxRuntimeEngine"),
    ("xpuruntime.engines.tensorrt", "TensorRtEngine"),
    ("xpuruntime.engines.tensorrt", "TensorRtRtxEngine"),
    ("xpuruntime.engines.openvino", "OpenVinoEngine"),
    ("xpuruntime.engines.qnn", "QnnEngine"),
    ("xpuruntime.engines.torch", "TorchEngine"),
    ("xpuruntime.engines.null", "NullEngine"),
)

_default: EngineRegistry | None = None
_partial: EngineRegistry | None = None
_making = threading.RLock()


def known_engines(registry: EngineRegistry | None) -> EngineRegistry:
    """Return the registry that a caller gave, or the default. Raises TypeError where it is none."""
    check_types({"registry": REGISTRY}, {"registry": registry}, optional=("registry",))
    return default_registry() if registry is None else registry


def default_registry() -> EngineRegistry:
    """Return the process-wide registry: the engines of this package, then those of installed plugins.

    It is made on first use. A plugin that fails is left out, with one `XpuRuntimeWarning` that names it and the reason.
    """
    global _default, _partial
    if _default is not None:
        return _default
    failures: list[str] = []
    with _making:
        if _partial is not None:  # made by another thread meanwhile, or asked for by a plugin that is being loaded
            return _partial
        from xpuruntime.engines.plugins import register_plugins

        _partial = registry = EngineRegistry()
        try:
            for module, name in _BUILTIN:
                registry.register(getattr(importlib.import_module(module), name)())
            failures = register_plugins(registry)
        except BaseException:
            _partial = None
            raise
        _default = registry
    for failure in failures:  # at the end, for a filter may turn a warning into an error
        warnings.warn(failure, XpuRuntimeWarning, stacklevel=2)
    return registry
