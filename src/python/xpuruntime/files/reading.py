# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Untrusted files: regular ones only, JSON, and sizes of ZIP archives."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, overload

import msgspec

from xpuruntime.files.paths import checked, kind_of

if TYPE_CHECKING:
    import zipfile

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
    """Open a regular file, or a link to one, to read bytes. It never waits, whatever the path names."""
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


_T = TypeVar("_T")


@overload
def decode_json(data: bytes | str | msgspec.Raw) -> Any: ...


@overload
def decode_json(data: bytes | str | msgspec.Raw, kind: type[_T]) -> _T: ...


def decode_json(data: bytes | str | msgspec.Raw, kind: Any = Any) -> Any:
    """Decode JSON as `msgspec.json.decode` does, with one class of errors for everything that can be wrong with it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        raise
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:  # text that is no UTF-8 among them
        raise msgspec.DecodeError(str(error)) from None


def decode_unique(data: bytes) -> Any:
    """Decode JSON as `decode_json` does, and refuse an object that has a name twice, of which readers take either."""
    import json

    value = decode_json(data)

    def refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
        names = Counter(name for name, _ in pairs)
        if twice := [name for name, count in names.items() if count > 1]:
            raise msgspec.DecodeError(f"it states {twice[0]!r:.60} more than once in one object")

    try:
        json.loads(data, object_pairs_hook=refuse_repeated)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    return value


#: Bytes that any archive may unpack to, and times its own size that a larger one may.
_FREE = 256 << 20
_TIMES = 32
_MEMBERS = 1_000_000


def unpacked_too_large(archive: zipfile.ZipFile, packed: int) -> str | None:
    """Return why an archive is not unpacked; ``None`` where its sizes are plausible.

    A member never unpacks to more than its entry states, since Python stops there.
    """
    members = archive.infolist()
    if len(members) > _MEMBERS:
        return f"it has {len(members):,} members, and at most {_MEMBERS:,} are read"
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        return "two of its members have one name"
    total = sum(member.file_size for member in members)
    if total > max(_FREE, _TIMES * packed):
        return (
            f"it has {packed:,} bytes and unpacks to {total:,}: more than {_TIMES} times its size, and more than "
            f"{_FREE >> 20} MiB"
        )
    return None
