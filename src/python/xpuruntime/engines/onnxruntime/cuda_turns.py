# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Mutual exclusion among the CUDA sessions of a process: one lock a session, and all of them for a graph capture.

A session has one stream, so its runs queue their work one after the other, under the session's lock, which is free
again when the work is queued. Sessions go on side by side.

ONNX Runtime captures a CUDA graph in CUDA's global mode: an allocation, a copy that waits or a query of an event by any
other thread of the process fails meanwhile, and spoils the capture. So a capture holds the locks of all sessions, none
is opened, observed or closed beside it, and no host arrays are on their way.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["between_captures", "capturing_alone", "new_turn", "no_capture"]

_changed = threading.Condition()
#: Locks of the sessions that are open, in the order in which they were made.
_turns: list[weakref.ref[Any]] = []
#: What no capture may be beside, captures that wait for its end, and whether there is one.
_working = _waiting = 0
_capturing = False


def new_turn() -> Any:
    """Return the lock of a new session."""
    turn = threading.Lock()
    with _changed:
        _turns[:] = [one for one in _turns if one() is not None]
        _turns.append(weakref.ref(turn))
    return turn


@contextlib.contextmanager
def no_capture() -> Iterator[None]:
    """For a block that opens, observes or closes a session: wait for a capture, and let none begin. May be nested."""
    global _working
    with _changed:
        if not _working:
            _changed.wait_for(lambda: not _capturing)
        _working += 1
    try:
        yield
    finally:
        with _changed:
            _working -= 1
            _changed.notify_all()


class _BetweenCaptures:
    """For a run of host arrays, which is short and holds no capture up: it lets one that waits go first."""

    def __enter__(self) -> None:
        global _working
        with _changed:
            while _capturing or _waiting:
                _changed.wait()
            _working += 1

    def __exit__(self, *_: object) -> None:
        global _working
        with _changed:
            _working -= 1
            if not _working:
                _changed.notify_all()


#: Not to be nested, nor inside of `no_capture`.
between_captures = _BetweenCaptures()


@contextlib.contextmanager
def capturing_alone() -> Iterator[None]:
    """For a block that captures a graph: no session runs, and none is opened or closed. Not inside of the others."""
    global _capturing, _waiting
    with _changed:
        _waiting += 1
        try:
            _changed.wait_for(lambda: not _capturing and not _working)
        finally:
            _waiting -= 1
            _changed.notify_all()
        _capturing = True
        turns = [turn for one in _turns if (turn := one()) is not None]
    try:
        with contextlib.ExitStack() as held:
            for turn in turns:
                held.enter_context(turn)
            yield
    finally:
        with _changed:
            _capturing = False
            _changed.notify_all()
