# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`copy_parts`: parts of one array copied into it, by several threads where they are large."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from xpuruntime.runtime.process_forks import reset_in_child

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    import numpy as np

    Place = tuple[slice, ...]

__all__ = ["copy_parts"]

#: Bytes up to which waking other threads takes longer than copying.
_SMALL = 1 << 20
#: Threads that copy, beside those that need it, at most; one for so many processors.
_MOST, _PROCESSORS = 3, 4


class _Copiers:
    """Threads that are started when they are first needed, also in a child of a fork, which has not its parent's."""

    def __init__(self) -> None:
        self.in_child()
        reset_in_child(self)
        self.count = min(_MOST, len(os.sched_getaffinity(0)) // _PROCESSORS if hasattr(os, "sched_getaffinity") else 0)

    def in_child(self) -> None:
        """Begin anew; see `Forks`."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        """Return them."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="xpuruntime-copy")
            return self._pool


_copiers = _Copiers()


def copy_parts(made: np.ndarray[Any, Any], parts: Iterable[tuple[Place, np.ndarray[Any, Any]]]) -> None:
    """Copy each part to its place in an array. Returns when all are there.

    NumPy copies without the GIL, and needs it after each part: one thread alone waits for it behind those that take
    requests and give answers.
    """
    left = deque(parts)
    if made.nbytes < _SMALL or len(left) < 2 or made.dtype.hasobject or not _copiers.count:
        _copy(made, left)
        return
    helping: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        for _ in range(min(_copiers.count, len(left) - 1)):
            helping.append(_copiers.pool().submit(_copy, made, left))
    try:
        _copy(made, left)
    finally:
        failures = [one.exception() for one in helping if not one.cancel()]  # none writes any more
    for failure in failures:
        if failure is not None:
            raise failure


def _copy(made: np.ndarray[Any, Any], left: deque[tuple[Place, np.ndarray[Any, Any]]]) -> None:
    while True:
        try:
            place, part = left.popleft()
        except IndexError:
            return
        made[place] = part
