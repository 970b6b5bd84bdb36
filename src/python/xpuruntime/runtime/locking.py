# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks between processes, held on an open file.

The system gives a lock back when its process ends, however it ends, so none is left behind. Network folders may not
keep such locks between machines: give each machine a folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

__all__ = ["locked"]

_PAUSE = 0.005
_LONGEST_PAUSE = 0.2


@contextlib.contextmanager
def locked(path: Path, *, seconds: float | None = None) -> Generator[None, None, None]:
    """Hold the lock on `path`, a file that is made where there is none, and that stays.

    Threads of one process keep each other out as well. Waiting ends at once on Ctrl-C.

    Parameters
    ----------
    path : Path
    seconds : float, optional
        How long to wait for others; default: for as long as it takes.

    Raises
    ------
    TimeoutError
        Another process held it all that time.
    OSError
        The file cannot be made.
    """
    with path.open("ab") as file:
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = _PAUSE
        while not _try_lock(file.fileno()):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {file.name} for {seconds:g} s")
            time.sleep(pause)
            if deadline is None:
                pause = min(pause * 1.5, _LONGEST_PAUSE)
        try:
            yield
        finally:
            _unlock(file.fileno())


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 0, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
