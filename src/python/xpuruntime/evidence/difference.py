# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Difference`: one difference between two reports, locks or environments, and its rows in tables."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

#: Entries and nodes that a text names; all of them are in the JSON.
_ENTRIES, _NODES = 4, 3


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between two sides: reports, environments, or a lock and what is here.

    Attributes
    ----------
    subject : str
        Such as ``"packages.onnxruntime"``, ``"output y"`` or the name of a unit.
    code : str
        What differs about it: a `DriftCode` of a lock, else such as ``"kernel"`` or ``"precision"``; empty where the
        subject says it.
    before, after : str or None
        ``None`` where a side has none of that name. Of a lock, what it expects and what is found.
    validator : str
        Of a lock, the id of the validator that does not hold.
    entries : tuple of str
        Of a lock, the entries that depend on it.
    nodes : tuple of str
        Source nodes concerned.
    reason : str
        Why the second side has another value, where that is said.
    causes : tuple of str
        Subjects of differences of the environment, and where a side is a lock of the plan, that may have caused it.
    restore : str
        The pin or command that restores the first side; empty where none is known.
    figures : dict of str to float
        Of an output: ``max_abs``, ``max_rel`` (a share of the largest value) and ``cosine``, where they are finite.
    """

    subject: str
    code: str = ""
    before: str | None
    after: str | None
    validator: str = ""
    entries: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    reason: str = ""
    causes: tuple[str, ...] = ()
    restore: str = ""
    figures: dict[str, float] = {}

    @property
    def about(self) -> str:
        """What differs, without the values: code, and the nodes or the subject."""
        names = listed(self.nodes, _NODES) or self.subject
        return f"{self.code}: {names}" if self.code else names

    @property
    def text(self) -> str:
        """What differs, in one sentence without a full stop."""
        repeated = not self.code or (self.validator and self.subject == self.code)
        name = self.subject if repeated else f"{self.code} {self.subject}"
        text = f"{name}: expected {self.before}, found {self.after}"
        if not self.validator:
            return text
        if self.reason:
            text = f"{name}: {self.reason} (expected {self.before}, found {self.after})"
        entries = f"entr{'y' if len(self.entries) == 1 else 'ies'} {listed(self.entries, _ENTRIES)}"
        return f"{text} (validator {self.validator}; {entries if self.entries else 'no entry depends on it'})"

    def __str__(self) -> str:
        return f"{self.text}. Fix: {self.restore}" if self.restore else self.text


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def difference_rows(differences: Sequence[Difference], *fields: str) -> list[tuple[str, ...]]:
    """Return what differs, both values and more fields by name, as the cells of a table in text or HTML."""
    return [
        (
            difference.about,
            *("-" if value is None else value for value in (difference.before, difference.after)),
            *(getattr(difference, name) or "-" for name in fields),
        )
        for difference in differences
    ]
