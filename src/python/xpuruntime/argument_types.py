# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Argument types of public functions: a wrong one is a `TypeError` that names argument, expected and found."""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

_SESSION = ("xpuruntime.inference.session", "InferenceSession")


class ArgumentType(msgspec.Struct, frozen=True):
    """What an argument may be: in words for messages, and as a test."""

    words: str
    fits: Callable[[Any], bool]


def check_types(
    types: Mapping[str, ArgumentType], arguments: Mapping[str, Any], *, optional: Iterable[str] = ()
) -> None:
    """Refuse arguments of a wrong type."""
    for name, kind in types.items():
        value = arguments[name]
        if not (value is None and name in optional) and not kind.fits(value):
            raise TypeError(f"{name} is {kind.words}, got {_shown(value)}")


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value)
    if kind in (str, int, float, bool, bytes):
        return f"{value!r:.60} of type {kind.__name__}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"an object of type {kind.__qualname__}"


def _whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _instance(module: str, name: str) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        known = sys.modules.get(module)  # there is no object of a class whose module was never imported
        return known is not None and isinstance(value, getattr(known, name))

    return fits


def _listed(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
            return False
        return not hasattr(value, "__len__") or all(map(accepts, value))  # an iterator is gone through but once

    return fits


def _text(value: Any) -> bool:
    return isinstance(value, str)


COUNT = ArgumentType("a whole number", _whole)
COUNTS = ArgumentType("a list of whole numbers", _listed(_whole))
NUMBER = ArgumentType("a number", lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool))
FLAG = ArgumentType("True or False", lambda value: isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"))
TEXT = ArgumentType("text", _text)
TEXTS = ArgumentType("text, or a list of it", lambda value: _text(value) or _listed(_text)(value))
NAMES = ArgumentType("a list of names", _listed(_text))
PATH = ArgumentType("a path, str or os.PathLike[str]", lambda value: isinstance(value, (str, os.PathLike)))
MAPPING = ArgumentType("a mapping", lambda value: isinstance(value, Mapping))
ARRAYS = ArgumentType("a mapping of input name to array", lambda value: isinstance(value, Mapping))
CALLABLE = ArgumentType("a function", lambda value: callable(value) and not isinstance(value, type))
REGISTRY = ArgumentType(
    "an EngineRegistry, such as xpuruntime.engines.EngineRegistry()",
    _instance("xpuruntime.engines.registry", "EngineRegistry"),
)
SESSIONS = ArgumentType(
    "a mapping of name to InferenceSession",
    lambda value: isinstance(value, Mapping) and all(map(_instance(*_SESSION), value.values())),
)
SERVICE = ArgumentType(
    "a service, such as xpuruntime.serving.Models", lambda value: callable(getattr(value, "infer", None))
)
TRANSPORT_OPTIONS = ArgumentType(
    "a TransportOptions, such as xpuruntime.serving.TransportOptions()",
    _instance("xpuruntime.serving.transport.options", "TransportOptions"),
)
PAGES = ArgumentType(
    "a mapping of path to function",
    lambda value: isinstance(value, Mapping) and all(_text(path) and callable(page) for path, page in value.items()),
)
MACHINE = ArgumentType(
    "a Machine, such as xpuruntime.runtime.machine_snapshot() returns",
    _instance("xpuruntime.runtime.machine", "Machine"),
)
