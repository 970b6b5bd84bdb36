# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`write_whole`: a text file that is there whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from xpuruntime.errors import InputError

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """Write `text` to `path`. A crash or a full disk leaves the old file, or none.

    Parameters
    ----------
    path : str or os.PathLike
    text : str
    what : str
        What it is, for the message of an error: ``"the report"``.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise InputError(
            f"cannot write {what} to '{target}': {error.strerror or error}. Give a path in a folder that "
            "exists, is writable and has room."
        ) from error
    return target
