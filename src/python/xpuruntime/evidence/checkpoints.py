# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checkpoints of an engine's instrumented pass, at which an observer may sample.

Engines call `checkpoint`; an observer set by `observe_checkpoints` is called with its name, otherwise nothing happens.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["COLD", "COUNTED", "LOADED", "checkpoint", "observe_checkpoints"]

#: What every engine that makes an instrumented copy calls the same things.
LOADED = "instrumented copy loaded"
COLD = "its first, cold run"
COUNTED = "its counted runs"

_WATCHER: ContextVar[Callable[[str], None] | None] = ContextVar("xpuruntime_moment", default=None)


def checkpoint(name: str) -> None:
    """Call the observer of this context with `name`, if there is one."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(name)


@contextlib.contextmanager
def observe_checkpoints(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call ``watcher(name)`` at every checkpoint inside of the block, in place of an outer observer."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)
