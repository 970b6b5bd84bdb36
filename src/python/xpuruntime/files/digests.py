# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SHA-256 digests of files, read in blocks."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["digest_of", "file_digest"]

_BLOCK = 1 << 20


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    with open_regular(path) as file:
        return digest_of(file, os.fstat(file.fileno()).st_size)


def digest_of(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the next `size` bytes of an open file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    while block := file.read(min(_BLOCK, size)):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()
