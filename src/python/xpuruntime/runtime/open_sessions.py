# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which sessions are open, for reports of who holds memory. Nothing is kept alive by being here."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["HoldsMemory", "note_open", "open_sessions"]

_lock = threading.Lock()
_noted: weakref.WeakValueDictionary[int, HoldsMemory] = weakref.WeakValueDictionary()


class HoldsMemory(Protocol):
    """What a session is here."""

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner; raise when it is closed."""


def note_open(session: HoldsMemory) -> None:
    """List a session until it is closed or forgotten."""
    with _lock:
        _noted[id(session)] = session


def open_sessions() -> list[HoldsMemory]:
    """Return those noted that still exist, in the order in which they were opened; some may be closed."""
    with _lock:
        return list(_noted.values())
