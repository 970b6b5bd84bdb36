# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks between processes, held on an open file.

The system releases a lock when its process ends, however it ends. Network folders may not keep such locks between
machines: give each machine a folder of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

__all__ = ["is_named", "locked", "try_lock"]

_FLAGS = (
    os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
)

_PAUSE = 0.005
_LONGEST_PAUSE = 0.2


@contextlib.contextmanager
def locked(path: Path, *, seconds: float | None = None) -> Generator[None, None, None]:
    """Hold the lock on `path`, a file that is made for it and removed by the last who holds it.

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
        The file cannot be made, or is no regular file.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    pause = _PAUSE
    while True:
        descriptor = _open(path)
        try:
            while not try_lock(descriptor):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {seconds:g} s")
                time.sleep(pause)
                if deadline is None:
                    pause = min(pause * 1.5, _LONGEST_PAUSE)
            if not is_named(descriptor, path):
                continue  # who held it has removed it meanwhile
            try:
                yield
            finally:
                if os.name != "nt":  # which removes no file that others have open
                    with contextlib.suppress(OSError):
                        path.unlink()
                _unlock(descriptor)
            return
        finally:
            os.close(descriptor)


def _open(path: Path) -> int:
    descriptor = os.open(path, _FLAGS, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file, as that of a lock is", str(path))
    return descriptor


def is_named(descriptor: int, path: Path) -> bool:
    """Whether a path names an open file: another process may have removed it, and made one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def try_lock(descriptor: int) -> bool:
        """Lock an open file unless another has locked it, and return whether that was done."""
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

    def try_lock(descriptor: int) -> bool:
        """Lock an open file unless another has locked it, and return whether that was done."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
