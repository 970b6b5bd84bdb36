# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`FilePath`: the kind of fields that name a file or folder, which a file states relative to its own folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xpuruntime.policies.kinds import Text

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FilePath", "in_folder", "seen_from"]


class FilePath(Text):
    """The path of a file or folder; `words` are values that are no path."""

    def __init__(self, doc: str = "", *, words: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(doc, **options)
        self._words = words

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:
        """Return the path as `move` changes it."""
        return value if value is None or value in self._words else move(value)


def in_folder(folder: str) -> Callable[[str], str]:
    """Return a function from a path, where that is relative, to the absolute path below a folder."""
    base = os.path.abspath(folder or os.curdir)  # noqa: PTH100 - keeps links

    def move(path: str) -> str:
        return path if _is_fixed(path) else os.path.normpath(os.path.join(base, path))  # noqa: PTH118

    return move


def seen_from(folder: str) -> Callable[[str], str]:
    """Return a function from a path to the same as a file in a folder states it: relative where it is below that."""
    base = os.path.abspath(folder or os.curdir)  # noqa: PTH100 - keeps links

    def move(path: str) -> str:
        if path.startswith("~"):
            return path
        absolute = os.path.abspath(path)  # noqa: PTH100 - keeps links
        if not absolute.startswith(os.path.join(base, "")):  # noqa: PTH118
            return absolute
        return os.path.relpath(absolute, base).replace(os.sep, "/")

    return move


def _is_fixed(path: str) -> bool:
    return os.path.isabs(path) or path.startswith("~")  # noqa: PTH117 - text, which may be of another system
