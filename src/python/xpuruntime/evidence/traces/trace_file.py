# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`write_trace`: a trace as a file for Perfetto and ``chrome://tracing``, whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.runtime.files import replace_file

__all__ = ["cannot_write", "check_trace", "trace_path", "write_trace"]


def trace_path(path: str | os.PathLike[str]) -> Path:
    """Return where a trace goes.

    Raises
    ------
    InputError
        The name does not end as that of a trace.
    """
    target = Path(path)
    if not target.name.endswith((".json", ".json.gz")):
        msg = f"a trace is written as '.json' or '.json.gz', and the path is '{target}': end it so"
        raise InputError(msg)
    return target


def check_trace(path: str | os.PathLike[str]) -> None:
    """Refuse a path to which no trace can be written.

    Raises
    ------
    InputError
    """
    target = trace_path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(prefix=".xpuruntime-trace-", dir=target.parent) as probe:
            probe.write(b"{}")
    except OSError as error:
        raise cannot_write(target, error) from error


def write_trace(target: Path, document: dict[str, Any]) -> None:
    """Write a trace, compressed if its name ends in ``.gz``. A crash or a full disk leaves the old file, or none.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    data = msgspec.json.encode(document)
    try:
        replace_file(target, gzip.compress(data, 6) if target.name.endswith(".gz") else data, private=False)
    except OSError as error:
        raise cannot_write(target, error) from error


def cannot_write(target: Path, error: Exception) -> InputError:
    """Return the error for a trace that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return InputError(
        f"cannot write the trace to '{target}': {reason}. Give the path of a file, in a folder that exists, is "
        "writable and has room."
    )
