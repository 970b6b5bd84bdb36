# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumented methods of a loaded model: wrappers of a profile while it records.

The model itself is left as it is: Python reads the attributes of an object more slowly for good once one was added to
it and taken away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["instrumented_method", "set_call_instrumentation"]

_watching: Callable[[Any, str], Callable[..., Any]] | None = None


def set_call_instrumentation(wrap: Callable[[Any, str], Callable[..., Any]] | None) -> None:
    """Have ``wrap(model, name)`` give what is called in place of a model's method; ``None``: the method itself."""
    global _watching
    _watching = wrap


def instrumented_method(model: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of a loaded model, as whoever watches wants it called."""
    wrap = _watching
    method: Callable[..., Any] = getattr(model, name) if wrap is None else wrap(model, name)
    return method
