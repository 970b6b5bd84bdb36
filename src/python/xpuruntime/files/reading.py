# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reader of regular files: pipes, devices and sockets are refused at once, and sizes are known before reading."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from xpuruntime.files.paths import checked, kind_of

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["NotRegularError", "open_regular", "read_regular"]

_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
)


class NotRegularError(OSError):
    """A path names a pipe, a device or a socket, where a file is read."""


def open_regular(path: str | os.PathLike[str], limit: int | None = None) -> BinaryIO:
    """Open a regular file, or a link to one, to read bytes. It never waits, whatever the path names.

    Parameters
    ----------
    path : str or os.PathLike
    limit : int, optional
        Bytes that it may have.

    Raises
    ------
    OSError
        There is none, it cannot be read, is no regular file (`NotRegularError`, IsADirectoryError), or is larger.
    """
    name = checked(path)
    _check(os.stat(name), name)  # noqa: PTH116 - before it is opened: opening a device may do something
    # The file object alone closes the descriptor: an interruption can come between any two steps.
    file = open(name, "rb", opener=_open)  # noqa: SIM115 - the caller closes it
    try:
        facts = os.fstat(file.fileno())
        _check(facts, name)
        if limit is not None and facts.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {facts.st_size:,} bytes, and at most {limit:,} are read", name)
        return file
    except BaseException:
        file.close()
        raise


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises OSError as `open_regular`."""
    with open_regular(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)  # files of /proc have no size, and some no end


def _open(name: str, _: int) -> int:
    return os.open(name, _FLAGS)


def _check(facts: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(facts.st_mode):
        raise NotRegularError(errno.EINVAL, f"it is a {kind_of(name)}, not a regular file", name)
