# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Scratch folders: temporary folders that no end of a process leaves behind.

Those that an interruption has left are removed at exit, and those of killed processes by the next that makes one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from xpuruntime.files.exit_cleanup import register_cleanup, unregister_cleanup
from xpuruntime.files.locking import try_lock
from xpuruntime.files.staging import checksum

__all__ = ["ScratchFolder"]

_NAME = re.compile(r"xpuruntime-[a-z]+-([0-9a-f]{16})-([0-9a-f]{8})-\w+")


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder, as `tempfile.TemporaryDirectory`, that is locked while its process lives.

    Parameters
    ----------
    purpose : str
        A word for its name, in small letters.

    Raises
    ------
    OSError
        It cannot be made.
    """

    def __init__(self, purpose: str) -> None:
        room = Path(tempfile.gettempdir())
        _remove_dead(room)
        while True:
            token = secrets.token_hex(8)
            self._registered = (room, f"xpuruntime-*-{token}-*")
            register_cleanup(*self._registered)
            super().__init__(prefix=f"xpuruntime-{purpose}-{token}-{checksum(token)}-", ignore_cleanup_errors=True)
            descriptor = _lock(self.name)
            if descriptor is not None:
                self._release = weakref.finalize(self, _close, descriptor)
                return
            super().cleanup()
            unregister_cleanup(*self._registered)

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        unregister_cleanup(*self._registered)
        self._release()


def _lock(name: str) -> int | None:
    """Lock a folder and return its descriptor; ``None`` where a sweep was quicker, -1 where folders have no locks."""
    if os.name == "nt":
        return -1
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if try_lock(descriptor) and Path(name).exists():
            return descriptor
    except OSError:  # a file system without locks, on which nobody sweeps
        return descriptor
    os.close(descriptor)
    return None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _remove_dead(folder: Path) -> None:
    """Remove scratch folders of this user whose process has ended without doing so."""
    if os.name == "nt":
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None or named[2] != checksum(named[1]):
                continue
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if try_lock(descriptor):
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(descriptor)
