# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SHA-256 digests of files, and a cache of those of large ones.

A file is the same, as for version control, while device, inode, size and the times of its last change are: of content
(mtime) and of anything (ctime), which no program can set. A file that changed a moment before is not remembered, since
a second change might have the same times; nor is one that some process has open or mapped for writing, since stores
into a page that is mapped and dirty leave the times as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.paths import cache_folder, make_private, not_private
from xpuruntime.files.reading import open_regular, read_regular

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["VARIABLE", "digest_of", "file_digest", "open_file_digest", "recall_digest", "remember_digest"]

_BLOCK = 1 << 20


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    with open_regular(path) as file:
        return open_file_digest(file)[0]


def open_file_digest(file: BinaryIO) -> tuple[str, os.stat_result]:
    """Return the SHA-256 of a file that was just opened, in hex, and the facts that it is of. Raises OSError."""
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


#: Turns the cache off.
VARIABLE = "XPURUNTIME_DIGEST_CACHE"
#: Bytes of a file from which hashing takes long enough.
_LEAST = 16 << 20
#: Seconds that the last change is ago: longer than the steps in which file systems count.
_SETTLED = 2.0
#: Entries that are kept, how many of the oldest go at a time, and bytes of one.
_MOST, _DROPPED, _SMALL = 1000, 100, 200
#: File systems that leave the times of a file as they are when a page of it is mapped and written.
_WITHOUT_TIMES = ("tmpfs", "ramfs", "hugetlbfs")
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


def remember_digest(file: BinaryIO, before: os.stat_result, digest: str) -> None:
    """Keep the digest of a file that was read, with its facts before; where it cannot be kept, nothing is."""
    changed = max(before.st_mtime, before.st_ctime)
    if not _large(before) or not 0 <= changed < time.time() - _SETTLED or not _tells_changes(file, before):
        return
    if _state(before) != _state(os.fstat(file.fileno())):
        return
    try:
        folder = _folder()
        make_private(folder)
        if not_private(folder):
            return
        _drop_oldest(folder)
        from xpuruntime.files.writing import replace_file

        replace_file(folder / _name(before), f"{_state(before)} {digest}".encode())
    except (OSError, XpuRuntimeError):
        return


def _large(facts: os.stat_result) -> bool:
    """Whether the digest of a file is kept: only Linux says who may write to it."""
    enabled = os.environ.get(VARIABLE, "").strip().lower() != "off"
    return facts.st_size >= _LEAST and sys.platform == "linux" and enabled


def _tells_changes(file: BinaryIO, facts: os.stat_result) -> bool:
    """Whether every change from now on shows in the times of a file.

    A lease for reading is refused while a process has the file open or mapped for writing, and to all but its owner.
    """
    import fcntl

    device = f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}"
    try:
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split()[2] == device and line.partition(" - ")[2].split()[0] in _WITHOUT_TIMES:
                return False
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # that of a lease which is broken; it is ignored by default
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, IndexError):
        return False
    return True


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
