# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Digests of a model file and of its external data."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import ModelError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

__all__ = ["external_digests", "model_digest"]


def model_digest(info: ModelInfo) -> str:
    """Return the SHA-256, in hex, of a model file with its external data."""
    if not info.external_files:
        return info.sha256
    digest = hashlib.sha256(info.sha256.encode())
    for location, found in external_digests(info).items():
        digest.update(f"{location}\0{found}\0".encode())
    return digest.hexdigest()


def external_digests(info: ModelInfo) -> dict[str, str]:
    """Return file of external data to its SHA-256, in hex. Raises as `model_digest`."""
    digests = {}
    for file in sorted(info.external_files, key=lambda one: one.location):
        path = Path(info.base_dir or ".") / file.location
        try:
            facts = path.stat()
            digests[file.location] = _remembered(str(path), facts.st_size, facts.st_mtime_ns)
        except OSError as error:
            msg = f"cannot use the model {info.path!r}: its data {file.location!r} cannot be read ({reason_of(error)})"
            raise ModelError(f"{msg}. Fix: put the file back beside the model.") from None
    return digests


@functools.lru_cache(maxsize=64)
def _remembered(path: str, size: int, mtime_ns: int) -> str:
    """Return the digest of a file that had this size and time."""
    del size, mtime_ns
    return file_digest(path)
