# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Paths that users name, the cache folder of one user, and outputs that would replace inputs."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xpuruntime.errors import InputError
from xpuruntime.printable import printable

#: What `kind_of` calls a file by the type in its mode.
_KINDS = {
    0o100000: "file",
    0o040000: "folder",
    0o010000: "pipe",
    0o020000: "character device",
    0o060000: "block device",
    0o140000: "socket",
}


def user_path(value: str | os.PathLike[str], what: str) -> Path:
    """Return a path that a user gave."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str):
        raise TypeError(f"the path of {what} is a str or os.PathLike[str], got a {type(value).__name__}")
    problem = _problem(text)
    if problem:
        raise InputError(f"the path of {what}, {text[:80]!r}, {problem}. Fix: correct the path.")
    return Path(text)


def _problem(text: str) -> str:
    if not text:
        return "is empty"
    if "\0" in text:
        return "has a null byte in it"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "has a character that this system's file names cannot have"
    return ""


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return ``"file"``, ``"folder"``, ``"missing"``, ``"pipe"``, another type, or why it is not known. Never raises.

    Links are followed.
    """
    text = os.fspath(path)
    problem = _problem(text)
    if problem:
        return f"a path that {problem}"
    try:
        mode = os.stat(text).st_mode  # noqa: PTH116 - a Path would copy the text once more
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        return reason_of(error)
    return _KINDS.get(mode & 0o170000, "special file")


def reason_of(error: BaseException) -> str:
    """Return the reason of an error about a file without numbers and paths: ``"No space left on device"``."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def folder_of(path: str) -> str:
    """Return the folder of a file as an absolute path, which holds when the process changes its working directory.

    Where the working directory is not UTF-8 but the path is, it stays relative to it: engines open nothing else.
    """
    folder = str(Path(path).absolute().parent)
    return folder if is_utf8(folder) or not is_utf8(path) else str(Path(path).parent)


def checked(path: str | os.PathLike[str]) -> str:
    """Return a path as text. Raises OSError for what no system takes as one, in place of Python's ValueError."""
    text = os.fspath(path)
    problem = _problem(text)
    if problem:
        raise OSError(errno.EINVAL, f"the path {problem}", text)
    return text


def home_folder() -> Path:
    """Return the user's home folder: ``HOME``, or that of the user database."""
    stated = os.environ.get("USERPROFILE" if os.name == "nt" else "HOME", "")
    if stated and Path(stated).is_absolute():
        return Path(stated)
    if os.name != "nt":
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
        if home and Path(home).is_absolute():
            return Path(home)
    raise InputError(_no_home())


def _no_home() -> str:
    user = f"user id {os.getuid()}" if hasattr(os, "getuid") else "this user"
    return (
        f"there is no home folder: HOME is not set, and {user} has no entry in the user database. Fix: set HOME or "
        "XDG_CACHE_HOME, or name a folder without ~"
    )


def with_home(stated: str, what: str) -> Path:
    """Return a path in which ``~`` stands for the home folder. Raises as `user_path` and `home_folder`."""
    path = user_path(stated, what)
    if path.parts[:1] == ("~",):
        return home_folder().joinpath(*path.parts[1:])
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(
            f"the path of {what}, {stated!r}, names a user without a home folder. Fix: write it in full"
        ) from None


def is_utf8(path: str) -> bool:
    """Whether a path can be given to libraries that take text: the name of a file on Linux may be any bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_bytes(value: Any, **options: Any) -> bytes:
    """Return JSON, as `msgspec.json.encode`, also of file names that are not UTF-8, whose bytes are escaped."""
    import msgspec

    try:
        return msgspec.json.encode(value, **options)
    except UnicodeEncodeError:
        hook = options.get("enc_hook")
        return msgspec.json.encode(_printable(msgspec.to_builtins(value, enc_hook=hook)), **options)


def json_text(value: Any, *, indent: int | None = 2, **options: Any) -> str:
    """Return JSON text, as `json_bytes`; `indent` ``None`` gives one line."""
    import msgspec

    raw = json_bytes(value, **options)
    return (raw if indent is None else msgspec.json.format(raw, indent=indent)).decode()


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return value


def cache_folder() -> Path:
    """Return ``xpuruntime`` in the user's cache folder, which may not exist: ``XDG_CACHE_HOME``, or the system's."""
    if sys.platform == "linux":  # as platformdirs, which imports more than opening a session otherwise does
        base = os.environ.get("XDG_CACHE_HOME", "")
        home = os.environ.get("HOME", "")
        if os.path.isabs(base) or os.path.isabs(home):  # noqa: PTH117 - on the way to every session
            return Path(base if os.path.isabs(base) else f"{home}/.cache", "xpuruntime")  # noqa: PTH117
    import platformdirs

    try:
        return platformdirs.user_cache_path("xpuruntime", appauthor=False, opinion=False)
    except RuntimeError:
        raise InputError(_no_home()) from None


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, that only this user can enter; one that is there stays as it is."""
    checked(folder)
    created: list[Path] = []
    try:
        for parent in (*reversed(folder.parents), folder):
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
                created.append(parent)
        if not folder.is_dir():
            folder.mkdir()  # raises what is wrong
    except OSError:
        for parent in reversed(created):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def not_private(path: Path) -> str | None:
    """Return why a cache, or an entry of one, may hold what another user has put there, and the fix; else ``None``.

    What is missing is nobody's. The administrator is trusted.
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
    for status in (link, facts):
        if status.st_uid not in trusted:
            return f"{path} belongs to user id {status.st_uid}. Fix: name a place of your own, or remove it"
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


def refuse_overwriting(
    outputs: Mapping[str, str | os.PathLike[str] | None], inputs: Iterable[tuple[str, str | os.PathLike[str]]]
) -> None:
    """Refuse to write over what is read: by the same name, another spelling of it, a link or a hard link."""
    seen: list[tuple[str, Path]] = []
    read = [(what, Path(path)) for what, path in inputs if kind_of(path) in ("file", "folder")]
    for option, output in outputs.items():
        if output is None:
            continue
        target = user_path(output, option)
        resolved = Path(os.path.realpath(target))
        for what, path in read:
            if _same_file(resolved, path) or (
                kind_of(path) == "folder" and any(_same_file(parent, path) for parent in resolved.parents)
            ):
                raise InputError(
                    f"{option} {target} would replace {what} {str(path)!r}, which this reads. Fix: name another file"
                )
        for other, path in seen:
            if _same_file(resolved, path):
                raise InputError(f"{option} and {other} name the same file {target}. Fix: name two files")
        if kind_of(resolved) in ("file", "missing"):
            seen.append((option, resolved))


def _same_file(other: Path, path: Path) -> bool:
    try:
        return other.samefile(path)
    except OSError:
        return os.path.normcase(other) == os.path.normcase(os.path.realpath(path))
