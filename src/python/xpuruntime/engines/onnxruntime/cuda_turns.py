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

import threading
import weakref
from typing import Any

from xpuruntime import _core
from xpuruntime.runtime.interruptible_waits import ConditionVariable, uninterrupted

__all__ = ["between_captures", "capturing_alone", "new_turn", "no_capture"]

#: Not a condition: its methods in Python can be interrupted with the lock held.
_lock = threading.RLock()
#: Locks of the sessions that are open, in the order in which they were made.
_turns: list[weakref.ref[Any]] = []
#: Blocks that no capture may be beside, captures that wait for their end, and the one that goes on.
_working: set[object] = set()
_waiting: set[object] = set()
_capturing: set[object] = set()
#: That any of these changed.
_change = ConditionVariable(_lock)


def new_turn() -> Any:
    """Return the lock of a new session."""
    turn = threading.Lock()
    with _lock:
        _turns[:] = [one for one in _turns if one() is not None]
        _turns.append(weakref.ref(turn))
    return turn


class _BesideNoCapture:
    """A block that no capture may be beside; `_claim` says when it may begin."""

    def _claim(self) -> bool:
        raise NotImplementedError

    def _enter(self) -> None:
        _change.wait_for(self._claim)

    def _leave(self, *_: object) -> None:
        with _lock:
            _working.discard(self)
            if not _working:
                _change.notify_all()

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)


class no_capture(_BesideNoCapture):  # noqa: N801 - used like a function
    """For a block that opens, observes or closes a session: wait for a capture, and let none begin. May be nested."""

    def _claim(self) -> bool:
        if _capturing and not _working:
            return False
        _working.add(self)
        return True


class between_captures(_BesideNoCapture):  # noqa: N801 - used like a function
    """For a run of host arrays, which is short and holds no capture up: it lets one that waits go first.

    Not to be nested, nor inside of `no_capture`.
    """

    def _claim(self) -> bool:
        if _capturing or _waiting:
            return False
        _working.add(self)
        return True


class capturing_alone:  # noqa: N801 - used like a function
    """For a block that captures a graph: no session runs, and none is opened or closed. Not inside of the others."""

    def __init__(self) -> None:
        self._sessions: list[Any] = []
        self._held: list[Any] = []

    def _enter(self) -> None:
        _change.wait_for(self._claim)
        uninterrupted(self._acquire)

    def _claim(self) -> bool:
        if _capturing or _working:
            _waiting.add(self)
            return False
        _capturing.add(self)
        _waiting.discard(self)
        self._sessions = [turn for one in _turns if (turn := one()) is not None]
        return True

    def _leave(self, *_: object) -> None:
        uninterrupted(self._release)
        with _lock:
            _waiting.discard(self)
            _capturing.discard(self)
            _change.notify_all()

    def _acquire(self) -> None:
        for turn in self._sessions:
            turn.acquire()
            self._held.append(turn)

    def _release(self) -> None:
        while self._held:
            self._held.pop().release()

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)
