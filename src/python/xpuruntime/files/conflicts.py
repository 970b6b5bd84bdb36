# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conflicts of paths: an output that is an input of the same command, or another output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of, user_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["refuse_overwriting"]


def refuse_overwriting(
    outputs: Mapping[str, str | os.PathLike[str] | None], inputs: Iterable[tuple[str, str | os.PathLike[str]]]
) -> None:
    """Refuse to write over what is read: by the same name, another spelling of it, a link or a hard link.

    Parameters
    ----------
    outputs : mapping of str to path or None
        The option and where it writes. Two options must not write to one file.
    inputs : iterable of (str, path)
        What is read, and its path. Nothing may be written into a folder that is read.

    Raises
    ------
    InputError
    """
    seen: list[tuple[str, Path]] = []
    read = [(what, Path(path)) for what, path in inputs if kind_of(path) in ("file", "folder")]
    for option, given in outputs.items():
        if given is None:
            continue
        target = user_path(given, option)
        place = Path(os.path.realpath(target))
        for what, path in read:
            if _same(place, path) or (kind_of(path) == "folder" and any(_same(one, path) for one in place.parents)):
                raise InputError(
                    f"{option} {target} would replace {what} {str(path)!r}, which this reads. Fix: name another file"
                )
        for other, path in seen:
            if _same(place, path):
                raise InputError(f"{option} and {other} name the same file {target}. Fix: name two files")
        if kind_of(place) in ("file", "missing"):
            seen.append((option, place))


def _same(place: Path, path: Path) -> bool:
    try:
        return place.samefile(path)
    except OSError:
        return os.path.normcase(place) == os.path.normcase(os.path.realpath(path))
