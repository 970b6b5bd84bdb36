# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`replace_file`: a file of ours that other processes read is replaced as a whole, or stays as it was."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

__all__ = ["replace_file"]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def replace_file(target: Path, data: bytes, *, private: bool = True) -> None:
    """Write a file as a whole or not at all: who reads it sees the old content or the new, whatever befalls the writer.

    A link stays one, and what it leads to is replaced. What is no file, such as ``/dev/stdout``, is written to.

    Parameters
    ----------
    target : Path
    data : bytes
    private : bool
        Only the owner may read the file. Otherwise a file that is there keeps its permissions, and a new one has those
        of any new file.

    Raises
    ------
    OSError
        Nothing was replaced.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = target.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            target.write_bytes(data)
            return
        target = Path(os.path.realpath(target))
        if not private:
            _replace(target, data, 0o600, stat.S_IMODE(kind))
            return
    _replace(target, data, 0o600 if private else 0o666, None)


def _replace(target: Path, data: bytes, made: int, kept: int | None) -> None:
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
    descriptor = os.open(new, _NEW, made)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if kept is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), kept)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
