# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Folders that a process makes for a while: what an interruption has left of them is removed at its exit.

An interruption can come between any two steps of making or removing a folder. So a name is noted before there is a
folder, and forgotten when there is none any more.
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

__all__ = ["forget", "remember"]

#: By folder and pattern: the process, and how to remove what is there.
_noted: dict[tuple[str, str], tuple[int, Callable[[Path], None]]] = {}


def remember(folder: Path, pattern: str, remove: Callable[[Path], None] | None = None) -> None:
    """Have what is in a folder and fits a pattern of `Path.glob` removed at exit."""
    _noted[str(folder.absolute()), pattern] = os.getpid(), remove or _remove


def forget(folder: Path, pattern: str) -> None:
    """Take it back."""
    _noted.pop((str(folder.absolute()), pattern), None)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


@atexit.register
def _remove_all() -> None:
    for (folder, pattern), (process, remove) in list(_noted.items()):
        with contextlib.suppress(OSError):
            for path in Path(folder).glob(pattern) if process == os.getpid() else ():
                remove(path)
