# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`write_whole`: a text file that is there whole, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.files.writing import replace_file

if TYPE_CHECKING:
    import os
    from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """Write `text` to `path`. A crash or a full disk leaves the old file, or none."""
    target = user_path(path, what)
    try:
        replace_file(target, text.encode("utf-8", "backslashreplace"), private=False)
    except OSError as error:
        raise InputError(
            f"cannot write {what} to '{target}': {reason_of(error)}. Give a path in a folder that "
            "exists, is writable and has free space."
        ) from error
    return target
