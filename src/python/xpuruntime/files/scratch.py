# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Scratch folders: temporary folders that no end of a process leaves behind.

Those that an interruption has left are removed at exit, and those of killed processes by the next that makes one. An
interruption can come between any two steps of making or removing a folder. So a name is registered before there is a
folder, and unregistered when there is none any more.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"xpuruntime-[a-z]+-([0-9a-f]{16})-([0-9a-f]{8})-\w+")
#: By folder and pattern: the process, and how to remove what is there.
_registered: dict[tuple[str, str], tuple[int, Callable[[Path], None]]] = {}


def register_cleanup(folder: Path, pattern: str, remove: Callable[[Path], None] | None = None) -> None:
    """Have what is in a folder and fits a pattern of `Path.glob` removed at exit."""
    _registered[str(folder.absolute()), pattern] = os.getpid(), remove or _remove


def unregister_cleanup(folder: Path, pattern: str) -> None:
    """Leave it at exit."""
    _registered.pop((str(folder.absolute()), pattern), None)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


@atexit.register
def _remove_all() -> None:
    for (folder, pattern), (process, remove) in list(_registered.items()):
        with contextlib.suppress(OSError):
            for path in Path(folder).glob(pattern) if process == os.getpid() else ():
                remove(path)


def checksum(token: str) -> str:
    """Return what follows the random part in the name of a folder of ours, so that no other name looks like one."""
    return hashlib.sha256(f"xpuruntime staging {token}".encode()).hexdigest()[:8]


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder, as `tempfile.TemporaryDirectory`, that is locked while its process lives."""

    def __init__(self, purpose: str) -> None:
        room = Path(tempfile.gettempdir())
        remove_dead(room)
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
    from filelock import lock_descriptor

    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if lock_descriptor(descriptor, blocking=False) and Path(name).exists():
            return descriptor
    except OSError:  # a file system without locks, on which nobody sweeps
        return descriptor
    os.close(descriptor)
    return None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def remove_dead(folder: Path) -> None:
    """Remove scratch folders of this user whose process has ended without doing so."""
    if os.name == "nt":
        return
    from filelock import lock_descriptor

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
                    if lock_descriptor(descriptor, blocking=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(descriptor)
