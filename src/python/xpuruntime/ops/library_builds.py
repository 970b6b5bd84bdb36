# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Build IDs of the libraries whose kernels were measured: validators of measured times."""

from __future__ import annotations

import fnmatch
import functools
import os
from typing import TYPE_CHECKING

from xpuruntime import _core
from xpuruntime.runtime.libraries.loading import mapped_paths, with_build_id
from xpuruntime.runtime.machine import Library

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BACKEND_LIBRARIES", "build_of", "core_build", "mapped_builds"]

#: Backends of the core to patterns of the libraries that have their kernels, loaded once one of them can serve.
BACKEND_LIBRARIES = {
    "cublas": ("libcublas.so*", "libcublasLt.so*"),
    "cudnn": ("libcudnn.so*",),
    "cpu": ("libscipy_openblas.so*",),
}


@functools.lru_cache(maxsize=256)
def build_of(path: str) -> str:
    """Return the build ID of a library's file; of one without, its size."""
    name = os.path.basename(path)  # noqa: PTH119 - a text
    library = with_build_id(Library(name=name, path=path, version=None, origin="system"))
    return library.build_id or f"{library.size} bytes"


def core_build() -> str:
    """Return the build of xpuruntime's own kernels: another one whenever they are compiled anew."""
    return build_of(str(_core.__file__))


def mapped_builds(patterns: Sequence[str]) -> dict[str, str]:
    """Return file name to build of the libraries that this process has mapped under one of these names."""
    found = {}
    for path in mapped_paths():
        name = os.path.basename(path)  # noqa: PTH119 - a text
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = build_of(os.path.realpath(path))
    return found
