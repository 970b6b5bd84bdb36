# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`copy_parts`: parts of one array copied into it, by several threads where they are large."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.runtime.cpu_cores import cpu_cores
from xpuruntime.runtime.process_forks import reset_in_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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
        self.count = min(_MOST, cpu_cores().logical // _PROCESSORS)

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

    The core copies several parts without the GIL in between, which NumPy needs after each: a thread would wait for it
    behind those that take requests and give answers.
    """
    left = list(parts)
    if made.nbytes < _SMALL or len(left) < 2 or made.dtype.hasobject or not _copiers.count:
        _copy(made, left)
        return
    shares = [left[start :: _copiers.count + 1] for start in range(min(_copiers.count + 1, len(left)))]
    helping: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        for share in shares[1:]:
            helping.append(_copiers.pool().submit(_copy, made, share))
    try:
        for share in (shares[0], *shares[1 + len(helping) :]):
            _copy(made, share)
    finally:
        failures = [one.exception() for one in helping]  # none writes any more
    for failure in failures:
        if failure is not None:
            raise failure


def _copy(made: np.ndarray[Any, Any], parts: Sequence[tuple[Place, np.ndarray[Any, Any]]]) -> None:
    targets: list[Any] = []
    sources: list[Any] = []
    for place, part in parts:
        target = made[place]
        if target.shape == part.shape and target.flags.c_contiguous and part.flags.c_contiguous and _plain(made, part):
            targets.append(target)
            sources.append(part)
        else:
            target[...] = part
    _core.copy_arrays(targets, sources)


def _plain(made: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> bool:
    """Whether the bytes of a part are those of the array: of one dtype, and one that buffers have."""
    return made.dtype == part.dtype and made.dtype.kind in "biufc"
