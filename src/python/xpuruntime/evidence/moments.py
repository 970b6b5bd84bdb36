# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`moment`: a place in an engine's instrumented pass at which others may want to look.

Engines say where they are; who watches, for memory, is told. Nothing happens where nobody does.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COLD", "COUNTED", "LOADED", "moment", "watching_moments"]

#: What every engine that makes an instrumented copy calls the same things.
LOADED = "instrumented copy loaded"
COLD = "its first, cold run"
COUNTED = "its counted runs"

_WATCHER: ContextVar[Callable[[str], None] | None] = ContextVar("xpuruntime_moment", default=None)


def moment(name: str) -> None:
    """Tell whoever watches, on this thread or in this context, that `name` has just happened."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(name)


@contextlib.contextmanager
def watching_moments(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call ``watcher(name)`` at every moment inside of the block; a watcher from outside waits meanwhile."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)
