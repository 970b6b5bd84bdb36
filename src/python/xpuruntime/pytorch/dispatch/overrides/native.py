# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Native` and `Override`: a kernel of PyTorch's dispatcher, and what stands in its place."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import lookup

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ALIASES",
    "CLASSES",
    "HIGHER_ORDER",
    "IN_PYTHON",
    "TRACING",
    "Native",
    "Override",
    "has_native_kernel",
    "native_kernel",
    "never_compile",
    "qualified",
    "skip_in_dynamo",
]

#: In place of a dispatch key: the function stands in for an operator only while `torch.compile` traces.
TRACING = "Tracing"

#: In place of a dispatch key: the function stands in for one of a module's, by its name there.
IN_PYTHON = "Python"

#: In place of a dispatch key: the function stands in for a higher-order operator's, at this key of the dispatcher.
HIGHER_ORDER = {"HigherOrderDense": "CompositeExplicitAutograd", "HigherOrderAutograd": "Autograd"}

#: In place of a dispatch key: the override adapts classes of models, by itself; see `xpuruntime.pytorch.adapters`.
CLASSES = "Classes"

#: An alias of many dispatch keys has no kernel of its own, but that of this one is the same.
ALIASES = {"CompositeImplicitAutograd": "CPU"}


def qualified(name: str) -> str:
    """Return the name of an operator with its namespace, which is ``aten`` where it states none."""
    return name if "::" in name else f"aten::{name}"


def native_kernel(name: str, key: str) -> Any:
    """Return the kernel that is registered now for an operator. Raises `RuntimeError` if none is."""
    return torch.library.get_kernel(qualified(name), ALIASES.get(key, key))


def has_native_kernel(name: str, key: str) -> bool:
    """Say whether `native_kernel` finds one. PyTorch takes a hundred times as long to say that there is none."""
    operator, at = qualified(name), ALIASES.get(key, key)
    try:
        return _private_api.computes_at(operator, at)
    except RuntimeError:  # there is no such operator
        return False


def never_compile(make: Callable[..., Any]) -> None:
    """Have Dynamo leave alone the functions that `make` defines, and all that they call.

    PyTorch's dispatcher calls them. After a graph break `torch.compile` follows whatever runs in Python, functions
    behind an operator included. A PyTorch without this switch of Dynamo's warns where it does so.
    """
    for code in make.__code__.co_consts:
        if isinstance(code, CodeType):
            skip_in_dynamo(code)


def skip_in_dynamo(code: CodeType, *, within: bool = True) -> None:
    """Have Dynamo leave alone one function, by its code, and `within` all that it calls, as far as this PyTorch can."""
    _private_api.skip_frames(code, within=within)


class Native:
    """The kernel that an operator had at a dispatch key before an override replaced it.

    Called with the keyset of the dispatcher, then the operator's own arguments.
    """

    __slots__ = ("call", "key", "name", "refresh")

    def __init__(self, name: str, key: str, refresh: Callable[[Native], None]) -> None:
        self.name = name
        self.key = key
        self.refresh = refresh
        #: The bare kernel. What calls it hands an error to `again`.
        self.call: Any = None
        self.take()

    def take(self) -> None:
        """Take the kernel that is registered now. The override must not be in place."""
        self.call = native_kernel(self.name, self.key).call_boxed

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        try:
            return self.call(keyset, *args, **kwargs)
        except RuntimeError as error:
            return self.again(error, keyset, *args, **kwargs)

    def again(self, error: RuntimeError, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what is below the override now, where `error` states that the former kernel is gone. Else raise it."""
        if not lookup.is_kernel_gone(error):
            raise error
        self.refresh(self)
        return self.call(keyset, *args, **kwargs)


class Override(NamedTuple):
    """One xpuruntime kernel over one of PyTorch's."""

    name: str
    op: str
    keys: tuple[str, ...]
    make: Callable[[Any], Any]
    module: str = ""
    group: str = ""
