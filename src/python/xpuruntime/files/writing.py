# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Atomic writes: a file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.files.paths import checked, kind_of, reason_of
from xpuruntime.files.staging import staging, sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO

__all__ = ["check_writable", "files_beside", "replace_file"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_STREAM = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)

#: How long the reader of a pipe may take to open it.
_SECONDS_FOR_A_READER = 2.0


def replace_file(
    target: str | os.PathLike[str], data: bytes | Callable[[IO[bytes]], object], *, private: bool = True
) -> None:
    """Write a file as a whole or not at all: who reads it sees the old content or the new, whatever befalls the writer.

    A link stays one, and what it leads to is replaced. A pipe or a device such as ``/dev/stdout`` is written to.

    Parameters
    ----------
    target : str or os.PathLike
    data : bytes or callable
        The content, or what writes it to an open file.
    private : bool
        Only the owner may read the file. Otherwise a file that is there keeps its permissions, and a new one has those
        of any new file.

    Raises
    ------
    OSError
        Nothing was replaced; the error names `target`.
    """
    name = checked(target)
    write = (lambda file: file.write(data)) if isinstance(data, bytes) else data
    try:
        mode = _mode(name)
        if mode is not None and not stat.S_ISREG(mode):
            _write_stream(name, mode, write)
            return
        place = Path(os.path.realpath(name))
        with staging(place) as room:
            new = room / "file.new"
            descriptor = os.open(new, _NEW, 0o600 if private else 0o666)
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None and not private and hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, place)  # noqa: PTH105 - one name to watch in tests
            sync(place.parent)
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

    Raises
    ------
    OSError
        It cannot be written; a `target` that was there stays.
    """
    place = Path(os.path.realpath(checked(target)))
    mode = _mode(str(place))
    if mode is not None and not stat.S_ISREG(mode):
        _refuse_stream(str(place), mode)
        raise OSError(errno.EINVAL, f"it is a {kind_of(place)}, not a regular file", str(target))
    with staging(place) as room:
        files = room / "files"
        files.mkdir()
        yield files / target.name
        for file in sorted(files.iterdir(), key=lambda one: one.name == target.name):
            sync(file)
            file.replace(place if file.name == target.name else place.parent / file.name)
        sync(place.parent)


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
