# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`write_trace`: a trace as a file for Perfetto and ``chrome://tracing``, whole or not at all."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, reason_of, user_path
from xpuruntime.files.writing import check_writable, replace_file

if TYPE_CHECKING:
    import os
    from pathlib import Path

__all__ = ["cannot_write", "check_trace", "trace_path", "write_trace"]


def trace_path(path: str | os.PathLike[str]) -> Path:
    """Return where a trace goes."""
    target = user_path(path, "the trace")
    if not target.name.endswith((".json", ".json.gz")):
        msg = f"a trace is written as '.json' or '.json.gz', and the path is '{target}': end it so"
        raise InputError(msg)
    return target


def check_trace(path: str | os.PathLike[str]) -> None:
    """Refuse a path to which no trace can be written."""
    target = trace_path(path)
    try:
        check_writable(target)
    except OSError as error:
        raise cannot_write(target, error) from error


def write_trace(target: Path, document: dict[str, Any]) -> None:
    """Write a trace, compressed if its name ends in ``.gz``. A crash or a full disk leaves the old file, or none."""
    data = json_bytes(document)
    try:
        replace_file(target, gzip.compress(data, 6) if target.name.endswith(".gz") else data, private=False)
    except OSError as error:
        raise cannot_write(target, error) from error


def cannot_write(target: Path, error: Exception) -> InputError:
    """Return the error for a trace that cannot be written."""
    return InputError(
        f"cannot write the trace to '{target}': {reason_of(error)}. Give the path of a file, in a folder that "
        "exists, is writable and has free space."
    )
