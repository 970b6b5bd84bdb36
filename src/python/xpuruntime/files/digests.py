# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SHA-256 digests of files, read in blocks; those of large files that did not change are remembered."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["digest_of", "file_digest", "open_file_digest"]

_BLOCK = 1 << 20


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    with open_regular(path) as file:
        return open_file_digest(file)[0]


def open_file_digest(file: BinaryIO) -> tuple[str, os.stat_result]:
    """Return the SHA-256 of a file that was just opened, in hex, and the facts that it is of. Raises OSError."""
    from xpuruntime.files.digest_cache import recall_digest, remember_digest

    facts = os.fstat(file.fileno())
    digest = recall_digest(facts)
    if digest is None:
        digest = digest_of(file, facts.st_size)
        remember_digest(file, facts, digest)
    return digest, facts


def digest_of(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the next `size` bytes of an open file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    while block := file.read(min(_BLOCK, size)):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()
