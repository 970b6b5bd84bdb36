# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Diff`: what differs between two environments, level by level, with causes and pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.evidence.report_comparison import ReportComparison
from xpuruntime.evidence.writing import write_whole
from xpuruntime.files.paths import json_bytes, json_text
from xpuruntime.measuring.conditions import Conditions
from xpuruntime.measuring.statistics import RatioComparison

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["LEVELS", "SCHEMA", "Diff", "DiffRow", "Level"]

SCHEMA = "xpuruntime.diff/1"
#: The levels in the order in which a cause comes before its effect.
LEVELS = ("environment", "plan", "placement", "kernels", "numerics", "time")


class DiffRow(msgspec.Struct, frozen=True, kw_only=True):
    """One difference.

    Attributes
    ----------
    id : str
        Such as ``"packages.onnxruntime"`` or ``"output y"``.
    what : str
        What differs about it, such as ``"kernel"`` or ``"precision"``; empty in the environment.
    before, after : str
    nodes : tuple of str
        Source nodes concerned.
    causes : tuple of str
        Rows of the environment, and where a side is a lock of the plan, that may have caused it.
    restore : str
        The pin or command that restores the first side; empty where none is known.
    figures : dict of str to float
        Of an output: ``max_abs``, ``max_rel`` (a share of the largest value) and ``cosine``, where they are finite.
    """

    id: str
    what: str = ""
    before: str
    after: str
    nodes: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    restore: str = ""
    figures: dict[str, float] = {}


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a difference.

    Attributes
    ----------
    name : str
        One of `LEVELS`.
    verdict : {"same", "differs", "undecided", "unobservable", "not compared"}
    reason : str
        What the verdict does not cover, or why nothing was compared.
    rows : tuple of DiffRow
    """

    name: str
    verdict: Literal["same", "differs", "undecided", "unobservable", "not compared"]
    reason: str = ""
    rows: tuple[DiffRow, ...] = ()


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two environments for one model.

    Attributes
    ----------
    schema : str
    before, after : str
        The sides as they were given.
    model : str
    levels : tuple of Level
        In the order of `LEVELS`.
    comparison : ReportComparison or None
        Of the two reports, with everything that they have; ``None`` where a side is a lock.
    speed : RatioComparison or None
        Of interleaved rounds, where both sides are interpreters.
    conditions : Conditions or None
        Of the machine during these.
    notes : tuple of str
    """

    schema: str = SCHEMA
    before: str
    after: str
    model: str
    levels: tuple[Level, ...]
    comparison: ReportComparison | None = None
    speed: RatioComparison | None = None
    conditions: Conditions | None = None
    notes: tuple[str, ...] = ()

    def level(self, name: str) -> Level:
        """Return one level."""
        return next(one for one in self.levels if one.name == name)

    @property
    def exit_code(self) -> int:
        """0 the same, 1 a difference from plan to numerics, 4 only time differs or could not be decided.

        Differences of the environment alone, which are why one compares, do not count.
        """
        if any(one.verdict == "differs" for one in self.levels if one.name not in ("environment", "time")):
            return 1
        return 4 if self.level("time").verdict in ("differs", "undecided") else 0

    @property
    def headline(self) -> str:
        """One sentence: which levels differ."""
        differ = [one.name for one in self.levels if one.verdict == "differs"]
        open_ = [one.name for one in self.levels if one.verdict in ("undecided", "unobservable", "not compared")]
        said = f"{', '.join(differ)} {'differs' if len(differ) == 1 else 'differ'}" if differ else "nothing differs"
        return said + (f"; not known: {', '.join(open_)}" if open_ else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, with `headline` and `exit_code` in them."""
        found: dict[str, Any] = msgspec.json.decode(json_bytes(self))
        said = {"headline": self.headline, "exit_code": self.exit_code}
        comparison = None if self.comparison is None else self.comparison.to_dict()
        return {"schema": found.pop("schema"), **said, **found, "comparison": comparison}

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON. A crash or a full disk leaves the old file, or none.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        return write_whole(path, self.to_json() + "\n", "the difference")

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain
        from xpuruntime.locks.diff.text import render

        return plain(render(self), 100)

    def __rich__(self) -> RenderableType:
        from xpuruntime.locks.diff.text import render

        return render(self)
