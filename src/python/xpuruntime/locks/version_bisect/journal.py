# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`BisectJournal`: the verdicts of a bisection, a line each, so that one that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import kind_of, reason_of, user_path
from xpuruntime.files.reading import DamagedLineError, journal_line, read_journal_lines, read_regular
from xpuruntime.locks.version_bisect.result import VersionVerdict

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BisectJournal"]

SCHEMA = "xpuruntime.bisect.journal/1"
_MOST = 1 << 24


class BisectJournal:
    """Verdicts in a file; without a path, in memory alone."""

    def __init__(
        self, path: str | os.PathLike[str] | None, subject: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        self._path = None if path is None else user_path(path, "the journal")
        self.verdicts: dict[str, VersionVerdict] = {}
        self._digest = ""
        head = {"schema": SCHEMA, **json.loads(json.dumps(dict(subject)))}
        if self._path is None:
            if resume:
                raise InputError("there is nothing to resume without a journal. Fix: give --journal FILE")
            return
        if kind_of(self._path) == "file":
            if not resume:
                raise InputError(
                    f"the journal '{self._path}' is there. Fix: --resume goes on with it, or give another file"
                )
            self._read(head)
        elif resume:
            raise InputError(
                f"there is no journal '{self._path}' to resume. Fix: leave --resume out, or correct the path"
            )
        else:
            self._append(head, new=True)

    def add(self, verdict: VersionVerdict) -> None:
        """Add a verdict, on disk when this returns."""
        self.verdicts[verdict.version] = verdict
        if self._path is not None:
            self._append(msgspec.to_builtins(verdict))

    def _no_journal(self) -> str:
        return f"'{self._path}' is not a journal of a bisection. Fix: correct the path, or begin a new one"

    def _read(self, head: dict[str, Any]) -> None:
        assert self._path is not None
        try:
            data = read_regular(self._path, _MOST)
        except OSError as error:
            raise InputError(f"cannot read the journal '{self._path}': {reason_of(error)}") from error
        try:
            entries, length, self._digest = read_journal_lines(data)
        except DamagedLineError as error:
            if error.number == 1 and not error.changed and data.startswith(b"{"):
                raise InputError(self._no_journal()) from None
            raise InputError(f"the journal '{self._path}' cannot be read: line {error.number}: {error}") from None
        if not entries or entries[0].get("schema") != SCHEMA:
            raise InputError(self._no_journal())
        for name, value in head.items():
            if entries[0].get(name) != value:
                raise InputError(
                    f"the journal '{self._path}' is of another {name}: {entries[0].get(name)!r}, not {value!r}. "
                    "Fix: begin a new one"
                )
        try:
            found = msgspec.convert(entries[1:], list[VersionVerdict])
        except msgspec.ValidationError as error:
            raise InputError(f"the journal '{self._path}' cannot be read: {error}") from error
        self.verdicts = {one.version: one for one in found}
        if length < len(data):  # the line that a killed process was writing
            with self._path.open("r+b") as file:
                file.truncate(length)

    def _append(self, value: Any, *, new: bool = False) -> None:
        assert self._path is not None
        line, self._digest = journal_line(value, self._digest)
        try:
            with self._path.open("xb" if new else "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write the journal '{self._path}': {reason_of(error)}") from error
