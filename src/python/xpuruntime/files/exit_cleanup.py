# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cleanup at exit: temporary folders that an interruption has left are removed.

An interruption can come between any two steps of making or removing a folder. So a name is registered before there is
a folder, and unregistered when there is none any more.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register_cleanup", "unregister_cleanup"]

#: By folder and pattern: the process, and how to remove what is there.
_registered: dict[tuple[str, str], tuple[int, Callable[[Path], None]]] = {}


def register_cleanup(folder: Path, pattern: str, remove: Callable[[Path], None] | None = None) -> None:
    """Have what is in a folder and fits a pattern of `Path.glob` removed at exit."""
    _registered[str(folder.absolute()), pattern] = os.getpid(), remove or _remove


def unregister_cleanup(folder: Path, pattern: str) -> None:
    """Leave it at exit."""
    _registered.pop((str(folder.absolute()), pattern), None)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


@atexit.register
def _remove_all() -> None:
    for (folder, pattern), (process, remove) in list(_registered.items()):
        with contextlib.suppress(OSError):
            for path in Path(folder).glob(pattern) if process == os.getpid() else ():
                remove(path)
