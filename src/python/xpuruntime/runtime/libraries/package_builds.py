# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Package libraries: the shared libraries that an engine's package brings and needs, with their builds."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.runtime.libraries.loading import LibraryIndex, libraries_needed_by, loaded_libraries, with_build_id
from xpuruntime.runtime.machine import Library

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["package_libraries"]


def package_libraries(patterns: Sequence[str], *, cuda: bool) -> tuple[tuple[Library, ...], tuple[Library, ...]]:
    """Return the shared libraries of a package and the libraries of CUDA that they need. Imports and loads nothing."""
    own: dict[str, Library] = {}
    for pattern in patterns:
        package, _, inside = pattern.partition("/")
        for folder in _folders(package):
            for path in sorted(glob.glob(os.path.join(glob.escape(folder), inside))):  # noqa: PTH118, PTH207
                name = Path(path).name
                if Path(path).is_file():
                    version = re.search(r"\.so\.(\d[\d.]*)$", name)
                    found = Library(name=name, path=path, version=version[1] if version else None, origin="package")
                    own.setdefault(name, with_build_id(found))
    return tuple(own[name] for name in sorted(own)), _cuda_libraries(own) if cuda else ()


def _folders(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _cuda_libraries(own: dict[str, Library]) -> tuple[Library, ...]:
    """Return what the libraries need of CUDA, and what that needs in turn."""
    index: LibraryIndex | None = None
    loaded = {library.name: library for library in loaded_libraries()}
    found: dict[str, Library] = {}
    seen = set(own)
    paths = [library.path for library in own.values()]
    while paths:
        try:
            linked, later = libraries_needed_by(paths.pop())
        except InputError:
            continue
        for soname in (*linked, *later):
            if soname in seen:
                continue
            seen.add(soname)
            library = next(
                (one for name, one in loaded.items() if name == soname or name.startswith(soname + ".")), None
            )
            if library is None:
                index = index or LibraryIndex()
                library = next(iter(index.find_soname(soname)), None)
            if library is not None:
                found[soname] = with_build_id(library)
                paths.append(library.path)
    return tuple(found[soname] for soname in sorted(found))
