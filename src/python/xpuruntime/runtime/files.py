# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`replace_file`: a file of ours that other processes read is replaced as a whole, or stays as it was."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(target: Path, data: bytes) -> None:
    """Write a file as a whole or not at all: who reads it sees the old content or the new, whatever befalls the writer.

    Only its owner may read a file that is made so.

    Raises
    ------
    OSError
        Nothing was replaced.
    """
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
