# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SHA-256 digests of files, and small results that are kept between processes in a private folder, such as these."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.paths import cache_folder, make_private, not_private
from xpuruntime.files.reading import open_regular, read_regular


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


#: Turns the caches of what is known by content off.
VARIABLE = "XPURUNTIME_DIGEST_CACHE"
#: Bytes of a file from which hashing takes long enough.
LARGE = 16 << 20
#: Seconds that the last change is ago: longer than the steps in which file systems count.
_SETTLED = 2.0
_ENTRIES = CacheEntries("digests", most=1000, largest=200)
#: File systems that leave the times of a file as they are when a page of it is mapped and written.
_WITHOUT_TIMES = ("tmpfs", "ramfs", "hugetlbfs")
_DIGEST = r"[0-9a-f]{64}\Z"


def recall_digest(facts: os.stat_result) -> str | None:
    """Return the SHA-256, in hex, that a file with these facts had; ``None`` where it is not known."""
    if not _large(facts):
        return None
    kept = _ENTRIES.read(_name(facts))
    known, _, digest = (kept or b"").decode("ascii", "replace").partition(" ")
    return digest if known == file_state(facts) and re.match(_DIGEST, digest) else None


def remember_digest(file: BinaryIO, before: os.stat_result, digest: str) -> None:
    """Keep the digest of a file that was read, with its facts before; where it cannot be kept, nothing is."""
    changed = max(before.st_mtime, before.st_ctime)
    if not _large(before) or not 0 <= changed < time.time() - _SETTLED or not _tells_changes(file, before):
        return
    if file_state(before) != file_state(os.fstat(file.fileno())):
        return
    _ENTRIES.write(_name(before), f"{file_state(before)} {digest}".encode())


def _large(facts: os.stat_result) -> bool:
    """Whether the digest of a file is kept: only Linux says who may write to it."""
    return facts.st_size >= LARGE and sys.platform == "linux" and remembers()


def remembers() -> bool:
    """Whether anything that is known by the content of files is kept between processes."""
    return os.environ.get(VARIABLE, "").strip().lower() != "off"


def _tells_changes(file: BinaryIO, facts: os.stat_result) -> bool:
    """Whether every change from now on shows in the times of a file."""
    # A lease for reading is refused while a process has the file open or mapped for writing, and to all but its owner.
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


def _name(facts: os.stat_result) -> str:
    return f"{facts.st_dev:x}-{facts.st_ino:x}"


def file_state(facts: os.stat_result) -> str:
    """Return what differs once the content of a file has changed."""
    return f"{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"
