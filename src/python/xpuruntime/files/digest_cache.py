# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cache of the digests of large files, for later processes of the user, while the files are the same.

A file is the same, as for version control, while device, inode, size and the times of its last change are: of content
(mtime) and of anything (ctime), which no program can set. A file that changed a moment before is not remembered, since
a second change might have the same times.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.folders import cache_folder, make_private, not_private
from xpuruntime.files.reading import read_regular
from xpuruntime.files.writing import replace_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["VARIABLE", "recall_digest", "remember_digest"]

#: Turns the cache off.
VARIABLE = "XPURUNTIME_DIGEST_CACHE"
#: Bytes of a file from which hashing takes long enough.
_LEAST = 16 << 20
#: Seconds that the last change is ago: longer than the steps in which file systems count.
_SETTLED = 2.0
#: Entries that are kept, how many of the oldest go at a time, and bytes of one.
_MOST, _DROPPED, _SMALL = 1000, 100, 200
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def recall_digest(facts: os.stat_result) -> str | None:
    """Return the SHA-256, in hex, that a file with these facts had; ``None`` where it is not known."""
    if not _large(facts):
        return None
    try:
        folder = _folder()
        entry = folder / _name(facts)
        if not_private(folder) or not_private(entry):
            return None
        known, _, digest = read_regular(entry, _SMALL).decode("ascii").partition(" ")
    except (OSError, ValueError, XpuRuntimeError):
        return None
    return digest if known == _state(facts) and _DIGEST.match(digest) else None


def remember_digest(before: os.stat_result, after: os.stat_result, digest: str) -> None:
    """Keep the digest of a file with its facts before and after it was read; where it cannot be kept, nothing is."""
    changed = max(before.st_mtime, before.st_ctime)
    if not _large(before) or _state(before) != _state(after) or not 0 <= changed < time.time() - _SETTLED:
        return
    try:
        folder = _folder()
        make_private(folder)
        if not_private(folder):
            return
        _drop_oldest(folder)
        replace_file(folder / _name(before), f"{_state(before)} {digest}".encode())
    except (OSError, XpuRuntimeError):
        return


def _large(facts: os.stat_result) -> bool:
    """Whether the digest of a file is kept: on Windows the second time says when a file was made."""
    return facts.st_size >= _LEAST and os.name == "posix" and os.environ.get(VARIABLE, "").strip().lower() != "off"


def _folder() -> Path:
    return cache_folder() / "digests"


def _name(facts: os.stat_result) -> str:
    return f"{facts.st_dev:x}-{facts.st_ino:x}"


def _state(facts: os.stat_result) -> str:
    return f"{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"


def _drop_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) < _MOST:
        return
    for one in sorted(entries, key=lambda entry: entry.lstat().st_mtime)[:_DROPPED]:
        with contextlib.suppress(OSError):
            one.unlink()
