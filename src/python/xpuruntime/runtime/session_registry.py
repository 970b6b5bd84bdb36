# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Registry of open sessions and bindings, for reports and profiles; it holds weak references only."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from xpuruntime.runtime.process_forks import fork_lock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HoldsMemory", "note_bound", "note_open", "open_bindings", "open_sessions", "set_open_hook"]

_lock = fork_lock()
_noted: weakref.WeakValueDictionary[int, HoldsMemory] = weakref.WeakValueDictionary()
_bound: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_open_hook: Callable[[Any, Any], None] | None = None


class HoldsMemory(Protocol):
    """What a session is here."""

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner; raise when it is closed."""


def note_open(session: HoldsMemory) -> None:
    """List a session until it is closed or forgotten."""
    with _lock:
        _noted[id(session)] = session
    hook = _open_hook  # read once: another thread may remove it
    if hook is not None:
        hook(session, None)


def note_bound(session: HoldsMemory, binding: Any) -> None:
    """List a binding of a session until it is forgotten."""
    with _lock:
        _bound[binding] = weakref.ref(session)
    hook = _open_hook
    if hook is not None:
        hook(session, binding)


def open_sessions() -> list[HoldsMemory]:
    """Return those noted that still exist, in the order in which they were opened; some may be closed."""
    with _lock:
        return list(_noted.values())


def open_bindings() -> list[tuple[HoldsMemory, Any]]:
    """Return sessions and their bindings that still exist; some may be closed."""
    with _lock:
        return [(session, one) for one, known in _bound.items() if (session := known()) is not None]


def set_open_hook(hook: Callable[[Any, Any], None] | None) -> None:
    """Call ``hook(session, None)`` and ``hook(session, binding)`` for what is opened from now on."""
    global _open_hook
    _open_hook = hook
