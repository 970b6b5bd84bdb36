# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Library identity: soname, size and build ID of a shared library, and where its file is."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of
from xpuruntime.runtime.libraries.loading import LibraryIndex, mapped_paths
from xpuruntime.runtime.libraries.search import read_elf

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXTENSIONS", "find_file", "library_identity", "mapped_libraries", "operator_library", "path_in_packages"]

#: The distribution with operators for text, audio and images.
EXTENSIONS = "onnxruntime-extensions"


def mapped_libraries() -> dict[str, str]:
    """Return file name to path of the libraries that this process has mapped, sorted by path."""
    libraries: dict[str, str] = {}
    for path in mapped_paths():
        libraries.setdefault(os.path.basename(path), path)  # noqa: PTH119 - hot
    return libraries


def path_in_packages(path: str) -> str:
    """Return the path of a library relative to the folder of `sys.path` that it is in, else its absolute path."""
    for folder in sorted((entry for entry in sys.path if entry), key=len, reverse=True):
        prefix = os.path.join(folder, "")  # noqa: PTH118 - texts
        if path.startswith(prefix):
            return path[len(prefix) :]
        real = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118 - texts
        if os.path.realpath(path).startswith(real):
            return os.path.realpath(path)[len(real) :]
    return path


def operator_library(stated: str) -> str | None:
    """Return the file of a library of operators for ONNX Runtime; ``None`` where there is none."""
    if stated != EXTENSIONS:
        return stated if Path(stated).is_file() else None
    spec = importlib.util.find_spec(EXTENSIONS.replace("-", "_"))
    folders = [Path(location) for location in (spec.submodule_search_locations or ())] if spec is not None else []
    files = (path for folder in folders for path in sorted(folder.glob("_extensions_pydll*")))
    return next((str(path) for path in files if path.suffix in (".so", ".pyd")), None)


def find_file(name: str, place: str, mapped: Mapping[str, str]) -> str | None:
    """Return the file that this process has mapped, or would map, as the library `name`; ``None`` if none is found."""
    file = mapped.get(name)
    if file is not None:
        return file
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
    """Return ``soname``, ``size`` and ``build_id``; a file without build ID has ``sha256`` in its place."""
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
    try:
        digest = file_digest(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return (("sha256", digest), ("size", size), ("soname", soname))
