# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engine registry: which engines exist, by name and alias, and those of third parties."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.argument_types import REGISTRY, check_types
from xpuruntime.engines.base import Engine
from xpuruntime.engines.model.info import ModelInfo, inspect_model
from xpuruntime.errors import EngineError, EngineUnavailable, InputError, warn
from xpuruntime.policies.device_spec import ENGINE_PATTERN
from xpuruntime.policies.document import nearest, question
from xpuruntime.runtime.packages import load_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


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
                    f"engine name {word!r} is already registered, by {taken.__module__}.{taken.__qualname__}. "
                    "Fix: choose "
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
        engine = self._engines.get(self._aliases.get(name, name))
        if engine is not None:
            return engine
        near = nearest(name, [*self._engines, *self._aliases])
        registered = ", ".join(sorted(self._engines)) or "none"
        msg = f"unknown engine {name!r}{question(near, '.')} Registered: {registered}"
        fix = f"write {near or 'one of these'}, or install the package that registers {name}"
        raise EngineUnavailable(msg, fix=fix, engine=name)

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
    ("xpuruntime.engines.onnxruntime_genai", "OnnxRuntimeGenAiEngine"),
    ("xpuruntime.engines.openvino_genai", "OpenVinoGenAiEngine"),
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
        warn(failure)
    return registry


def read_model(
    model: Any,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    trust: bool = False,
    defer: bool = False,
) -> ModelInfo:
    """Return what is known of a model before any engine judges it; `defer` is that of `inspect_model`."""
    for engine in default_registry():
        if (info := engine.read(model, example_inputs, trust=trust)) is not None:
            return info
    if example_inputs is not None:
        raise InputError("example_inputs describe a torch module; a model says what it takes. Fix: leave them out")
    return inspect_model(model, defer=defer)


#: Entry points of this group have the engine's name and point at its class, or at a function that returns it.
GROUP = "xpuruntime.engines"


def register_plugins(registry: EngineRegistry) -> list[str]:
    """Register the engines that installed packages name, in order of name, after those that are there."""

    def load(point: EntryPoint) -> None:
        engine = _make(point)
        if engine.name != point.name:
            msg = f"its entry point is called {point.name!r} and the engine {engine.name!r}. Fix: call both the same"
            raise EngineError(msg)
        registry.register(engine)

    return [f"the engine plugin {name} is left out: {reason}" for name, reason in load_points(GROUP, load)]


def _what(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _make(point: EntryPoint) -> Engine:
    import re

    loaded = point.load()
    if not isinstance(loaded, type) and not isinstance(loaded, Engine) and callable(loaded):
        loaded = loaded()
    if isinstance(loaded, type) and issubclass(loaded, Engine):
        if inspect.isabstract(loaded):
            missing = ", ".join(sorted(loaded.__abstractmethods__))
            msg = f"{loaded.__qualname__} lacks {missing}"
            raise EngineError(msg)
        loaded = loaded()
    if not isinstance(loaded, Engine):
        msg = (
            f"{point.value} is no engine but {_what(loaded)}; it must be a subclass of "
            "xpuruntime.engines.Engine, or a function that returns one"
        )
        raise EngineError(msg)
    for word in (getattr(loaded, "name", None), *loaded.aliases):
        if not isinstance(word, str) or not re.fullmatch(ENGINE_PATTERN, word) or word in ("auto", "error"):
            shown = repr(word) if isinstance(word, str) else f"an object of type {type(word).__name__}"
            msg = f"{shown} cannot be the name of an engine: letters, digits, '_' and '-', starting with a letter"
            raise EngineError(msg)
    return loaded
