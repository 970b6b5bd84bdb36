# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`lock_history`: what changed in a lock from commit to commit of its git repository."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from xpuruntime.argument_types import COUNT, check_types
from xpuruntime.errors import InputError, LockError, XpuRuntimeError
from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.documents import Document
from xpuruntime.files.paths import user_path
from xpuruntime.lockfile.canonical import parse_lock
from xpuruntime.lockfile.differences import compare_identities

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

    from xpuruntime.lockfile.records import Lock

#: Differences of a revision that a text shows.
_SHOWN = 8


class LockRevision(msgspec.Struct, frozen=True, kw_only=True):
    """A lock as one commit has it.

    Attributes
    ----------
    commit : str
        Empty for the file in the working tree, where it is not the committed one.
    date : str
        Of the commit: ISO 8601.
    title : str
        The first line of its message.
    digest : str
        Of the lock; empty where it cannot be read.
    first : bool
        Whether there is no readable lock before it.
    differences : tuple of Difference
        From the lock before it. Where it is empty and this is not the first, only figures or notes changed.
    error : str
        Why it cannot be read, such as of a commit that removed it.
    """

    commit: str
    date: str = ""
    title: str
    digest: str = ""
    first: bool = False
    differences: tuple[Difference, ...] = ()
    error: str = ""


class LockHistory(Document, frozen=True, kw_only=True):
    """The revisions of a lock.

    Attributes
    ----------
    schema : str
    path : str
    revisions : tuple of LockRevision
        The latest first.
    """

    NOUN: ClassVar = "the history of a lock"
    TABLE: ClassVar = "revisions"

    schema: str = "xpuruntime.lock-history/1"
    path: str
    revisions: tuple[LockRevision, ...]

    def __rich__(self) -> RenderableType:
        """Return each revision with a table of what changed."""
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.evidence.render_text.changes import difference_table

        parts: list[RenderableType] = []
        for revision in self.revisions:
            parts.append(
                Text(
                    " ".join(part for part in (revision.commit[:10], revision.date[:10], revision.title) if part),
                    "bold",
                )
            )
            if revision.error:
                parts.append(Text(f"  not readable: {revision.error}", "yellow"))
            elif revision.first:
                parts.append(Text(f"  the first lock, {revision.digest}"))
            elif not revision.differences:
                parts.append(Text("  the same identity: figures or notes alone"))
            else:
                parts += difference_table("changes", revision.differences, most=_SHOWN, cut=True)
        return Group(*parts)


def lock_history(path: str | os.PathLike[str], *, limit: int = 20) -> LockHistory:
    """Return what changed in a lock, commit by commit, from the git repository that it lies in.

    Renames are followed. Locks of another release or that were edited are listed with the reason why they cannot be
    read.

    Parameters
    ----------
    path : str or path
    limit : int
        Most revisions; 1 or more.

    Raises
    ------
    InputError
        The file is in no repository, or no commit has it.
    XpuRuntimeError
        git is not installed.
    """
    check_types({"limit": COUNT}, {"limit": limit})
    if limit < 1:
        raise InputError(f"limit is {limit}: give a number of revisions, 1 or more")
    file = user_path(path, "the lock").absolute()
    # One more than is shown, which the last one is compared with.
    commits = _commits(file, limit + 1)
    contents = [_git(file, "cat-file", "blob", f"{commit.commit}:{commit.name}", check=False) for commit in commits]
    recorded = [
        _Revision(commit.commit, commit.date, commit.title, data)
        for commit, data in zip(commits, contents, strict=True)
    ]
    try:
        now = file.read_bytes()
    except OSError:
        now = None
    if now is not None and now != contents[0]:
        recorded.insert(0, _Revision("", "", "not committed", now))
    revisions: list[LockRevision] = []
    before: Lock | None = None
    for entry in reversed(recorded):
        revision, before = _compared(entry, before, str(path))
        revisions.insert(0, revision)
    return LockHistory(path=str(path), revisions=tuple(revisions[:limit]))


class _Commit(NamedTuple):
    commit: str
    date: str
    title: str
    name: str


class _Revision(NamedTuple):
    commit: str
    date: str
    title: str
    data: bytes | None


def _compared(revision: _Revision, before: Lock | None, where: str) -> tuple[LockRevision, Lock | None]:
    bare = LockRevision(commit=revision.commit, date=revision.date, title=revision.title)
    if revision.data is None:
        return msgspec.structs.replace(bare, error="the commit removed it"), before
    try:
        lock = parse_lock(revision.data, f"{where} of {revision.commit[:10] or 'the working tree'}")
    except LockError as error:
        return msgspec.structs.replace(bare, error=error.reason), before
    differences = () if before is None else compare_identities(before.identity, lock.identity)
    first = before is None
    return msgspec.structs.replace(bare, digest=lock.digest, first=first, differences=differences), lock


def _commits(file: Path, most: int) -> list[_Commit]:
    """Return the commits that changed a file, the latest first, each with the file's name in the repository then."""
    form = "--format=%x00%H%x1f%cI%x1f%s"
    text = _git(file, "log", "--follow", "--name-only", f"--max-count={most}", form, "--", file.name)
    commits = []
    for record in (text or b"").decode("utf-8", "surrogateescape").split("\0")[1:]:
        head, _, names = record.partition("\n")
        commit, date, title = head.split("\x1f", 2)
        commits.append(_Commit(commit, date, title, names.strip("\n")))
    if not commits:
        raise InputError(f"no commit has {file}. Fix: git add {file.name} && git commit")
    return commits


def _git(file: Path, *words: str, check: bool = True) -> bytes | None:
    command = ["git", "-C", str(file.parent), "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise XpuRuntimeError("git is not installed. Fix: install git") from None
    if done.returncode == 0:
        return done.stdout
    if not check:
        return None
    reason = done.stderr.decode(errors="replace").strip().removeprefix("fatal: ").partition("\n")[0]
    fix = f"commit the lock, git add {file.name} && git commit -m lock, in a repository that git init makes"
    raise InputError(f"git has no history of {file}: {reason}", fix=fix)
