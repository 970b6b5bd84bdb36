# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search path of the core for the libraries of vendors."""

from __future__ import annotations

from xpuruntime import _core
from xpuruntime.runtime.libraries.search import search_folders

__all__ = ["use_vendor_libraries"]


def use_vendor_libraries() -> None:
    """Tell the core the folders that may hold cuBLAS, cuDNN and others: wheels first, then the system's.

    The folders are listed, not searched; the core opens a library when a kernel of it is first asked for. What the
    process has loaded by then, PyTorch's own copy for example, is taken before any folder. Call it again after
    `sys.path` or the environment has changed.
    """
    _core.set_search_folders([place.path for place in search_folders()])
