# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Atomic writes: a file or folder is replaced as a whole, or stays as it was.

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
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from xpuruntime.errors import InputError
from xpuruntime.files.paths import checked, kind_of, reason_of, user_path
from xpuruntime.files.scratch import checksum, register_cleanup, unregister_cleanup

_NAME = re.compile(r"\.xpuruntime-([0-9a-f]{16})-([0-9a-f]{8})\.new")
_LOCK = ".lock"
#: In a staging folder: where the folder that is replaced lies, if the system cannot exchange two names in one step.
_OLD = "old.part"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
#: Locks may not reach to other machines: what another one has left is removed when it is this old, in seconds.
_FOREIGN_AGE = 24 * 3600
#: Seconds between two tries to take a lock.
_POLL = 0.02
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_STREAM = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
#: How long the reader of a pipe may take to open it.
_SECONDS_FOR_A_READER = 2.0
_EXCHANGE = 2
_AT_CWD = -100


@contextlib.contextmanager
def locked(path: Path, *, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock on `path`, a file that is made for it and removed by who holds it.

    The system releases a lock when its process ends, however it ends. Threads of one process keep each other out as
    well. Network folders may not keep such locks between machines: give each machine a folder of its own.
    """
    from filelock import FileLock, Timeout

    if kind_of(path) not in ("file", "missing"):
        raise OSError(errno.EINVAL, "it is not a regular file, as that of a lock is", str(path))
    lock = FileLock(path, poll_interval=_POLL)
    try:
        lock.acquire(timeout=-1 if seconds is None else seconds)
    except Timeout:
        raise TimeoutError(f"another process has held {path} for {seconds:g} s") from None
    try:
        yield
    finally:
        if os.name != "nt":  # which removes no file that others have open
            with contextlib.suppress(OSError):
                path.unlink()  # who waits for it sees that it has no name any more, and makes it anew
        lock.release()


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` that only this user can enter; it is removed afterwards.

    Those that killed writers have left in the same folder are removed first.
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
    """Move a finished folder from its staging folder to its place; who looks there sees the old one or the new one."""
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
            if _try_lock(descriptor) and _is_named(descriptor, room / _LOCK):
                return room, descriptor
        except BaseException:
            os.close(descriptor)
            shutil.rmtree(room, ignore_errors=True)
            raise
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to lock; on a file system without locks everybody passes here, and nobody passes in `_remove_dead`."""
    from filelock import lock_descriptor

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:
        return True


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether a path names an open file: another process may have removed it, and made one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _new_name() -> str:
    token = _host() + secrets.token_hex(4)
    return f".xpuruntime-{token}-{checksum(token)}.new"


def _host() -> str:
    name = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def _remove_dead(folder: Path) -> None:
    from filelock import lock_descriptor

    try:
        with os.scandir(folder) as entries:
            paths = [Path(entry.path) for entry in entries if _is_staging(entry)]
    except OSError:
        return  # who cannot list a folder may still write into it
    for room in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(room / _LOCK, _LOCK_FLAGS, 0o600)
            try:
                if not lock_descriptor(descriptor, blocking=False):
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
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return lambda path, other: int(call(_AT_CWD, path, _AT_CWD, other, _EXCHANGE))


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two names in one step; ``False`` where the system or the file system cannot."""
    call = _rename_two()
    if call is None:
        return False
    if call(os.fsencode(path), os.fsencode(other)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def replace_file(
    target: str | os.PathLike[str], data: bytes | Callable[[IO[bytes]], object], *, private: bool = True
) -> None:
    """Write a file as a whole or not at all: who reads it sees the old content or the new, whatever befalls the writer.

    A link stays one, and what it leads to is replaced. A pipe or a device such as ``/dev/stdout`` is written to.
    """
    name = checked(target)
    write = (lambda file: file.write(data)) if isinstance(data, bytes) else data
    try:
        mode = _mode(name)
        if mode is not None and not stat.S_ISREG(mode):
            _write_stream(name, mode, write)
            return
        path = Path(os.path.realpath(name))
        with staging(path) as room:
            new = room / "file.new"
            descriptor = os.open(new, _NEW, 0o600 if private else 0o666)
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None and not private and hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)  # noqa: PTH105 - one name to watch in tests
            sync(path.parent)
    except OSError as error:
        if error.filename == name:
            raise
        raise OSError(error.errno or errno.EIO, reason_of(error), name) from error


def check_writable(target: str | os.PathLike[str]) -> None:
    """Refuse a place where `replace_file` could not write. Raises OSError, which names it."""
    name = checked(target)
    mode = _mode(name)
    if mode is not None and not stat.S_ISREG(mode):
        _refuse_stream(name, mode)
        return
    with staging(Path(os.path.realpath(name))):
        pass


@contextlib.contextmanager
def files_beside(target: Path) -> Iterator[Path]:
    """Yield a place of the same name as `target` in a folder of its own.

    What is written to that folder is moved beside `target` afterwards, each file whole, `target` last.
    """
    path = Path(os.path.realpath(checked(target)))
    mode = _mode(str(path))
    if mode is not None and not stat.S_ISREG(mode):
        _refuse_stream(str(path), mode)
        raise OSError(errno.EINVAL, f"it is a {kind_of(path)}, not a regular file", str(target))
    with staging(path) as room:
        files = room / "files"
        files.mkdir()
        yield files / target.name
        for file in sorted(files.iterdir(), key=lambda path: path.name == target.name):
            sync(file)
            file.replace(path if file.name == target.name else path.parent / file.name)
        sync(path.parent)


def _mode(name: str) -> int | None:
    try:
        return os.stat(name).st_mode  # noqa: PTH116 - a Path would copy the text once more
    except FileNotFoundError:
        if name.endswith(("/", os.sep)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name) from None
        return None


def _refuse_stream(name: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, f"it is a {kind_of(name)}, which is not written to", name)


def _write_stream(name: str, mode: int, write: Callable[[IO[bytes]], object]) -> None:
    """Write to a pipe or a character device. A pipe that nobody reads is refused, not waited for."""
    _refuse_stream(name, mode)
    deadline = time.monotonic() + _SECONDS_FOR_A_READER
    while True:
        try:
            descriptor = os.open(name, _STREAM)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > deadline:
                raise OSError(errno.ENXIO, "it is a pipe without a reader", name) from None
            time.sleep(0.01)
        else:
            break
    with contextlib.suppress(OSError, AttributeError):
        os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        write(file)


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """Write `text` to `path`. A crash or a full disk leaves the old file, or none."""
    target = user_path(path, what)
    try:
        replace_file(target, text.encode("utf-8", "backslashreplace"), private=False)
    except OSError as error:
        raise InputError(
            f"cannot write {what} to '{target}': {reason_of(error)}. Fix: give a path in a folder that "
            "exists, is writable and has free space."
        ) from error
    return target
