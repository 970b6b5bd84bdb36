# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cache folders of one user: where they are, and whether others could have put something there."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.files.paths import checked, home_folder, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["cache_folder", "make_private", "not_private"]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ``xpuruntime`` in the user's cache folder: ``XDG_CACHE_HOME``, ``~/.cache``, or ``LOCALAPPDATA``.

    The folder may not exist yet.

    Raises
    ------
    InputError
        None is stated, and the user has no home folder.
    """
    folder = environment.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    # The XDG rules: a folder that is not absolute counts as not stated.
    base = Path(folder) if folder and Path(folder).is_absolute() else home_folder() / ".cache"
    return base / "xpuruntime"


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, that only this user can enter; one that is there stays as it is.

    Raises
    ------
    OSError
    """
    checked(folder)
    made: list[Path] = []
    try:
        for one in (*reversed(folder.parents), folder):
            if not one.exists():
                one.mkdir(mode=0o700, exist_ok=True)
                made.append(one)
        if not folder.is_dir():
            folder.mkdir()  # raises what is wrong
    except OSError:
        for one in reversed(made):
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def not_private(path: Path) -> str | None:
    """Return why a cache, or an entry of one, may hold what another user has put there, and the fix; else ``None``.

    What is not there is nobody's. The administrator is trusted.

    Parameters
    ----------
    path : Path
        A file or a folder. A link must be this user's as well as what it leads to.
    """
    if not hasattr(os, "getuid"):
        return None
    trusted = (os.getuid(), 0)
    try:
        checked(path)
        link, facts = path.lstat(), path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{str(path)[:300]!r} cannot be looked at ({reason_of(error)}). Fix: name another place"
    for found in (link, facts):
        if found.st_uid not in trusted:
            return f"{path} belongs to user id {found.st_uid}. Fix: name a place of your own, or remove it"
    open_to = "everybody" if facts.st_mode & stat.S_IWOTH else _writing_group(facts)
    if open_to is not None:
        return f"{path} can be written by {open_to}. Fix: chmod go-w '{path}' after a look at what is in it"
    return None


def _writing_group(facts: os.stat_result) -> str | None:
    """Return the group that may write, unless it is the user's own with nobody else in it."""
    if not facts.st_mode & stat.S_IWGRP or facts.st_gid == 0:
        return None
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(facts.st_gid), pwd.getpwuid(os.getuid())
    except KeyError:
        return f"the group {facts.st_gid}"
    if group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}:
        return None
    return f"the group {group.gr_name}"
