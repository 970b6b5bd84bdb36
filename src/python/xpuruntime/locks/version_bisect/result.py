# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`VersionBisect`: the verdict of each version that was judged, and the first that is bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.evidence.writing import write_whole
from xpuruntime.files.paths import json_bytes, json_text

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["SCHEMA", "VersionBisect", "VersionVerdict"]

SCHEMA = "xpuruntime.bisect/1"
_STYLE = {"good": "green", "bad": "bold red", "skipped": "yellow"}


class VersionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One version that was judged.

    Attributes
    ----------
    version : str
    verdict : {"good", "bad", "skipped"}
    reason : str
        What was observed, or why it could not be judged.
    seconds : float
        That installing and comparing took.
    """

    version: str
    verdict: Literal["good", "bad", "skipped"]
    reason: str
    seconds: float = 0.0


class VersionBisect(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a package that changed a claim.

    Attributes
    ----------
    schema : str
    package, good, bad : str
        As given.
    model, claim : str
    outcome : {"found", "not decided", "nothing changed", "not judged"}
        ``"not decided"``: the versions of `between` were skipped, and any of them may be the first that is bad.
        ``"nothing changed"``: the claim holds with the bad version. ``"not judged"``: that one was skipped.
    last_good, first_bad : str or None
    between : tuple of str
    versions : tuple of VersionVerdict
        In the order of the versions.
    untested : int
        Versions of the range that did not have to be judged.
    """

    schema: str = SCHEMA
    package: str
    good: str
    bad: str
    model: str
    claim: str
    outcome: Literal["found", "not decided", "nothing changed", "not judged"]
    last_good: str | None = None
    first_bad: str | None = None
    between: tuple[str, ...] = ()
    versions: tuple[VersionVerdict, ...] = ()
    untested: int = 0

    @property
    def exit_code(self) -> int:
        """0 the first bad version was found, 1 nothing changed, 3 the bad version was skipped, 4 not decided."""
        return {"found": 0, "nothing changed": 1, "not judged": 3, "not decided": 4}[self.outcome]

    @property
    def headline(self) -> str:
        """One sentence."""
        if self.outcome == "found":
            return f"{self.package} {self.first_bad} changed it; {self.last_good} is the last good version"
        if self.outcome == "not decided":
            suspects = ", ".join((*self.between, self.first_bad or ""))
            return f"one of {self.package} {suspects} changed it: the others could not be judged"
        if self.outcome == "nothing changed":
            return f"the claim holds with {self.package} {self.bad} as with {self.good}: nothing to find"
        return f"{self.package} {self.bad} could not be judged"

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, with `headline` and `exit_code` in them."""
        found: dict[str, Any] = msgspec.json.decode(json_bytes(self))
        return {"schema": found.pop("schema"), "headline": self.headline, "exit_code": self.exit_code, **found}

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON. A crash or a full disk leaves the old file, or none. Raises `InputError`."""
        return write_whole(path, self.to_json() + "\n", "the result")

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain

        return plain(self.__rich__(), 100)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.evidence.render_text.tables import table

        shown = table("versions", ("version", "verdict", ">seconds", "why"))
        for one in self.versions:
            verdict = Text(one.verdict, style=_STYLE[one.verdict])
            shown.add_row(Text(one.version), verdict, Text(f"{one.seconds:.1f}"), Text(one.reason))
        head = Text(self.headline, style="bold green" if self.exit_code == 0 else "bold yellow")
        what = Text(f"claim: {self.claim}, model: {self.model}, {self.package} {self.good}..{self.bad}")
        number = f"{self.untested} version{'s' * (self.untested != 1)}"
        rest = Text(f"{number} of the range did not have to be judged")
        return Group(head, what, shown, *([rest] if self.untested else []))
