# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CacheEntries`: small results that are kept between processes, in a private folder of the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.paths import cache_folder, make_private, not_private
from xpuruntime.files.reading import read_regular

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CacheEntries"]


class CacheEntries:
    """Entries of at most `largest` bytes by name. Where nothing can be kept, nothing is, and nothing is raised.

    An entry ends with the digest of what it holds: one that is damaged, cut off, or that another user could have
    written is none. Of `most` entries the oldest tenth goes.
    """

    def __init__(self, folder: str, *, most: int, largest: int) -> None:
        self._name, self._most, self._largest = folder, most, largest

    def read(self, name: str) -> bytes | None:
        """Return what an entry holds, or ``None``."""
        try:
            folder = self._folder()
            entry = folder / name
            if not_private(folder) or not_private(entry):
                return None
            data = read_regular(entry, self._largest + 32)
        except (OSError, ValueError, XpuRuntimeError):
            return None
        held, seal = data[:-32], data[-32:]
        return held if hashlib.sha256(held).digest() == seal else None

    def write(self, name: str, held: bytes) -> None:
        """Keep an entry. A part that a killed writer leaves does not match its digest, and is no entry."""
        if len(held) > self._largest:
            return
        try:
            folder = self._folder()
            make_private(folder)
            if not_private(folder):
                return
            self._drop_oldest(folder)
            entry = folder / name
            entry.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(entry, flags, 0o600), "wb") as file:
                file.write(held + hashlib.sha256(held).digest())
        except (OSError, ValueError, XpuRuntimeError):
            return

    def _folder(self) -> Path:
        return cache_folder() / self._name

    def _drop_oldest(self, folder: Path) -> None:
        entries = list(folder.iterdir())
        if len(entries) < self._most:
            return
        for entry in sorted(entries, key=lambda entry: entry.lstat().st_mtime)[: self._most // 10]:
            with contextlib.suppress(OSError):
                entry.unlink()
