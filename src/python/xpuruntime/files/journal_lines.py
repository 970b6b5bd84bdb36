# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lines of journals: JSON objects, each with a digest over itself and all before it, so that edits are found."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.files.paths import json_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DamagedLineError", "JournalLines", "journal_line", "read_journal_lines"]


class DamagedLineError(ValueError):
    """A line that is none of a journal, or was changed.

    Attributes
    ----------
    number : int
        From 1.
    changed : bool
        Whether it is a line of a journal, and it or one before it is not as it was written.
    """

    def __init__(self, number: int, *, changed: bool) -> None:
        reason = "this line was changed after it was written, or one before it was removed"
        super().__init__(reason if changed else "this is no line of a journal")
        self.number, self.changed = number, changed


class JournalLines(NamedTuple):
    """What a journal has.

    Attributes
    ----------
    entries : list of dict
    length : int
        Bytes of the whole lines. What follows was being written when the process ended.
    digest : str
        Of the last line, for the next one.
    """

    entries: list[dict[str, Any]]
    length: int
    digest: str


def journal_line(entry: Mapping[str, Any], digest: str) -> tuple[bytes, str]:
    """Return the line of an entry that follows one with this digest, ``""`` for the first, and its own digest."""
    body = json_bytes(entry)
    found = hashlib.sha256(digest.encode() + body).hexdigest()
    return body[:-1] + f',"sha256":"{found}"}}\n'.encode(), found


def read_journal_lines(data: bytes) -> JournalLines:
    """Return the entries of a journal.

    Raises
    ------
    DamagedLineError
    """
    whole = data[: data.rfind(b"\n") + 1]
    entries: list[dict[str, Any]] = []
    digest = ""
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise DamagedLineError(number, changed=False) from None
        if not isinstance(entry, dict) or "sha256" not in entry:
            raise DamagedLineError(number, changed=False)
        del entry["sha256"]
        expected, digest = journal_line(entry, digest)
        if expected != line:
            raise DamagedLineError(number, changed=True)
        entries.append(entry)
    return JournalLines(entries, len(whole), digest)
