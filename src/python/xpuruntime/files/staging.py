# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Staging folders: where files are written before they are moved to their place in one step.

A staging folder lies beside its target, since only a rename within one file system is atomic. Its name carries a
checksum and it holds a locked file, so that the next writer in the same folder removes those of killed writers, and
nothing else: no folder of the user's, and none of a writer that is alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.files.exit_cleanup import register_cleanup, unregister_cleanup
from xpuruntime.files.locking import is_named, try_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["checksum", "publish_folder", "staging", "sync"]

_NAME = re.compile(r"\.xpuruntime-([0-9a-f]{16})-([0-9a-f]{8})\.new")
_LOCK = ".lock"
#: In a staging folder: where the folder that is replaced lies, if the system cannot exchange two names in one step.
_OLD = "old.part"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
#: Locks may not reach to other machines: what another one has left is removed when it is this old, in seconds.
_FOREIGN_AGE = 24 * 3600
_EXCHANGE = 2
_AT_CWD = -100


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` that only this user can enter; it is removed afterwards.

    Those that killed writers have left in the same folder are removed first.

    Parameters
    ----------
    target : Path
        Without links in its last part.

    Raises
    ------
    OSError
        Nothing can be written there; the error names `target`.
    """
    _remove_dead(target.parent)
    try:
        room, descriptor = _claim(target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(target)) from None
    try:
        yield room
    finally:
        if os.name == "nt":
            os.close(descriptor)
            _remove(room)
        else:
            _remove(room)
            os.close(descriptor)
        unregister_cleanup(target.parent, room.name)


def publish_folder(new: Path, target: Path, *, check: Callable[[Path], None]) -> None:
    """Move a finished folder from its staging folder to its place; who looks there sees the old one or the new one.

    Parameters
    ----------
    new : Path
        In a staging folder of `target`. A folder that was there is moved into the staging folder.
    target : Path
    check : callable
        Called with the folder that is replaced; raises where it must not be.
    """
    for path in (*new.rglob("*"), new):
        sync(path)
    if not os.path.lexists(target):
        new.rename(target)
    else:
        check(target)
        if _exchange(new, target):
            try:
                check(new)  # not another one that came there meanwhile
            except BaseException:
                _exchange(new, target)
                raise
        else:
            old = new.with_name(_OLD) / target.name
            old.parent.mkdir()
            try:
                target.rename(old)
                new.rename(target)
            except BaseException:
                _restore(new.parent)
                raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows has no such call for folders
    if not path.is_dir() and not path.is_file():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # file systems that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _claim(target: Path) -> tuple[Path, int]:
    """Make a staging folder and lock it. One that a sweep has taken before it was locked is given up."""
    while True:
        room = target.parent / _new_name()
        register_cleanup(target.parent, room.name, _remove)
        try:
            room.mkdir(mode=0o700)
        except OSError:
            unregister_cleanup(target.parent, room.name)
            raise
        try:
            descriptor = os.open(room / _LOCK, _LOCK_FLAGS | os.O_EXCL, 0o600)
        except (FileNotFoundError, FileExistsError):
            continue
        except BaseException:
            shutil.rmtree(room, ignore_errors=True)
            raise
        try:
            if _locked(descriptor) and is_named(descriptor, room / _LOCK):
                return room, descriptor
        except BaseException:
            os.close(descriptor)
            shutil.rmtree(room, ignore_errors=True)
            raise
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Try to lock; on a file system without locks everybody passes here, and nobody passes in `_remove_dead`."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def _new_name() -> str:
    token = _host() + secrets.token_hex(4)
    return f".xpuruntime-{token}-{checksum(token)}.new"


def _host() -> str:
    name = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def checksum(token: str) -> str:
    """Return what follows the random part in the name of a folder of ours, so that no other name looks like one."""
    return hashlib.sha256(f"xpuruntime staging {token}".encode()).hexdigest()[:8]


def _remove_dead(folder: Path) -> None:
    """Remove the staging folders of writers that were killed."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if _is_staging(entry)]
    except OSError:
        return  # who cannot list a folder may still write into it
    for room in found:
        with contextlib.suppress(OSError):
            descriptor = os.open(room / _LOCK, _LOCK_FLAGS, 0o600)
            try:
                if not try_lock(descriptor):
                    continue
                if f"-{_host()}" not in room.name and time.time() - room.stat().st_mtime < _FOREIGN_AGE:
                    continue
                _restore(room)
                shutil.rmtree(room, ignore_errors=True)
            finally:
                os.close(descriptor)
            if os.name == "nt":
                shutil.rmtree(room, ignore_errors=True)


def _remove(room: Path) -> None:
    """Remove a staging folder of this process, but nothing that it was to replace and has not."""
    with contextlib.suppress(OSError):
        _restore(room)
    shutil.rmtree(room, ignore_errors=True)


def _is_staging(entry: os.DirEntry[str]) -> bool:
    named = _NAME.fullmatch(entry.name)
    if named is None or named[2] != checksum(named[1]) or not entry.is_dir(follow_symlinks=False):
        return False
    return not hasattr(os, "getuid") or entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _restore(room: Path) -> None:
    """Put a folder back whose writer was killed between moving it away and moving the new one to its place."""
    if (room / _OLD).is_dir():
        for old in (room / _OLD).iterdir():
            if not os.path.lexists(room.parent / old.name):
                old.rename(room.parent / old.name)


@functools.cache
def _rename_two() -> Callable[[bytes, bytes], int] | None:
    """Return Linux's rename that exchanges two names, or ``None``."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return lambda one, other: int(call(_AT_CWD, one, _AT_CWD, other, _EXCHANGE))


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; ``False`` where the system or the file system cannot."""
    call = _rename_two()
    if call is None:
        return False
    if call(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
