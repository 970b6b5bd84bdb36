# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lookup of PyTorch's private names: the table of them, and what stands for one that is missing."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOT_FOUND", "REFUSES", "TABLE", "PrivateName", "attribute", "find", "later", "take"]


class PrivateName(NamedTuple):
    """One name of PyTorch's that is private."""

    path: str
    why: str
    without: str


#: All of them, in the order in which they are taken.
TABLE: list[PrivateName] = []

NOT_FOUND = object()
REFUSES = "what needs it is refused"


def find(path: str) -> Any:
    """Return what has this name, or `NOT_FOUND`; imports its module."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            found: Any = sys.modules.get(name) or importlib.import_module(name)
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, NOT_FOUND)
            if found is NOT_FOUND:
                break
        if found is not NOT_FOUND:
            return found
    return NOT_FOUND


def take(path: str, why: str, *, without: str = REFUSES, otherwise: Any = NOT_FOUND) -> Any:
    """Return what has this name; `otherwise` where it is missing, or a function that refuses."""
    TABLE.append(PrivateName(path, why, without))
    found = find(path)
    if found is not NOT_FOUND:
        return found
    return _refusing(path, why) if otherwise is NOT_FOUND else otherwise


def later(path: str, why: str, *, without: str = REFUSES, otherwise: Any = NOT_FOUND) -> Callable[[], Any]:
    """Return a function that returns what has this name, whose module is imported by its first call."""
    TABLE.append(PrivateName(path, why, without))

    @functools.cache
    def get() -> Any:
        found = find(path)
        if found is not NOT_FOUND:
            return found
        return _refusing(path, why) if otherwise is NOT_FOUND else otherwise

    return get


def attribute(path: str, why: str, *, without: str = REFUSES, otherwise: Any = NOT_FOUND) -> Callable[[Any], Any]:
    """Return a function that returns this attribute of an object; `otherwise` of one that lacks it, or it refuses."""
    TABLE.append(PrivateName(path, why, without))
    name = path.rpartition(".")[2]

    def get(owner: Any) -> Any:
        found = getattr(owner, name, otherwise)
        return _refusing(path, why)() if found is NOT_FOUND else found

    return get


def _refusing(path: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        msg = f"this PyTorch {torch.__version__} has no {path}, {why}. Fix: install a release that xpuruntime supports"
        raise UnsupportedOperationError(msg, engine="torch")

    return refuse
