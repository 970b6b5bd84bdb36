# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Identities of shared libraries: soname, size and the build ID that the linker wrote, read from headers alone."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import open_regular
from xpuruntime.runtime.elf import read_elf
from xpuruntime.runtime.libraries import LibraryIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MappedLibraries", "find_file", "library_identity", "place_of"]


class MappedLibraries:
    """The libraries that this process has mapped, read once.

    Parameters
    ----------
    maps : str, optional
        Text in the form of ``/proc/self/maps``; default: this process. Empty where the system has none.
    """

    def __init__(self, maps: str | None = None) -> None:
        if maps is None:
            try:
                maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
            except OSError:
                maps = ""
        paths = {line.split(None, 5)[5].removesuffix(" (deleted)") for line in maps.splitlines() if ".so" in line}
        self._by_name: dict[str, str] = {}
        for path in sorted(paths):
            if path.startswith("/"):
                self._by_name.setdefault(os.path.basename(path), path)  # noqa: PTH119 - thousands of lines

    def matching(self, patterns: Iterable[str]) -> dict[str, str]:
        """Return file name to path of the libraries whose names match a pattern, sorted."""
        wanted = tuple(patterns)
        return {
            name: path
            for name, path in sorted(self._by_name.items())
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)
        }

    def path(self, name: str) -> str | None:
        """Return where the library of this file name was mapped from, or ``None``."""
        return self._by_name.get(name)


def place_of(path: str) -> str:
    """Return where a library lies relative to the folder of `sys.path` that it is in, or its absolute path."""
    for folder in sorted((one for one in sys.path if one), key=len, reverse=True):
        prefix = os.path.join(folder, "")  # noqa: PTH118 - texts
        if path.startswith(prefix):
            return path[len(prefix) :]
        real = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118 - texts
        if os.path.realpath(path).startswith(real):
            return os.path.realpath(path)[len(real) :]
    return path


def find_file(name: str, place: str, mapped: MappedLibraries) -> str | None:
    """Return the file that a process here has mapped, or would map, as the library `name`; ``None``: there is none.

    Parameters
    ----------
    name : str
        Its file name.
    place : str
        As `place_of` gave it where the lock was made.
    mapped : MappedLibraries
    """
    found = mapped.path(name)
    if found is not None:
        return found
    if not place.startswith("/"):
        for folder in sys.path:
            path = Path(folder or ".", place)
            if path.is_file():
                return str(path)
    elif Path(place).is_file():
        return place
    others = _index().find_soname(name) if name.startswith("lib") else []
    return others[0].path if others else None


@functools.cache
def _index() -> LibraryIndex:
    return LibraryIndex()


def library_identity(path: str) -> dict[str, Any]:
    """Return ``soname``, ``size`` and ``build_id``; a file without build ID has ``sha256`` in its place.

    Raises
    ------
    InputError
        The file cannot be read, or is no library.
    """
    try:
        facts = os.stat(path)  # noqa: PTH116 - hot
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return dict(_identity(path, facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns))


@functools.lru_cache(maxsize=1024)
def _identity(path: str, size: int, *_: int) -> tuple[tuple[str, Any], ...]:
    """Return the identity of a file that had this size, these times and this inode."""
    elf = read_elf(path)
    soname = elf.soname or os.path.basename(path)  # noqa: PTH119 - a text
    if elf.build_id:
        return (("build_id", elf.build_id), ("size", size), ("soname", soname))
    return (("sha256", _sha256(path)), ("size", size), ("soname", soname))


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return digest.hexdigest()
