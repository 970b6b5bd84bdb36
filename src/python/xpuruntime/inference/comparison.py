# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Comparison`: how several engines did on one model, as text, JSON and a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.evidence.tolerances import OutputFigures, Tolerance
from xpuruntime.files.paths import json_text
from xpuruntime.inference.bisect import Divergence
from xpuruntime.inference.drift import DriftReport
from xpuruntime.printable import printable

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

__all__ = ["Comparison", "EngineRow"]

SCHEMA = "xpuruntime.comparison/1"


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine did."""

    engine: str
    device: str
    precision: str
    status: Literal["agrees", "differs", "inconclusive", "rejected", "failed"]
    reason: str
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    median_us: float | None = None
    tolerance: Tolerance | None = None
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()
    outputs: tuple[OutputFigures, ...] = ()
    drift: DriftReport | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One model on several engines.

    Attributes
    ----------
    model : str
    reference : str
        Who computed what the others are compared with, as ``"engine.device.precision"``.
    inputs : str
        Where the input comes from.
    rows : tuple of EngineRow
        In the order asked.
    layers : bool
        Whether the drift of each layer was asked for.
    """

    model: str
    reference: str
    inputs: str
    rows: tuple[EngineRow, ...]
    layers: bool = False
    schema: str = SCHEMA

    @property
    def agreed(self) -> bool:
        """Whether every engine that the plan accepted ran and is within tolerance, and at least one did."""
        ran = [row for row in self.rows if row.status != "rejected"]
        return bool(ran) and all(row.status == "agrees" for row in ran)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        ran = [row for row in self.rows if row.status != "rejected"]
        if not ran:
            return "nothing ran: every engine was rejected"
        if self.agreed:
            return "the engine agrees" if len(ran) == 1 else f"all {len(ran)} engines agree"
        found = [(sum(row.status == "differs" for row in ran), "differ", "differs")]
        found.append((sum(row.status == "failed" for row in ran), "failed", "failed"))
        found.append((sum(row.status == "inconclusive" for row in ran), "are inconclusive", "is inconclusive"))
        words = " and ".join(f"{number} {one if number == 1 else many}" for number, many, one in found if number)
        return f"of {len(ran)} engines, {words}" if len(ran) > 1 else f"the engine {words.removeprefix('1 ')}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": plain.pop("schema"), "agreed": self.agreed, **plain}

    def to_json(self, *, indent: int = 2) -> str:
        """Return it as JSON text."""
        return json_text(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.evidence.page import render_comparison

        return render_comparison({"headline": self.headline, **self.to_dict()})

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of `to_html`. A crash or a full disk leaves the old file, or none.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        from xpuruntime.evidence.writing import write_whole

        return write_whole(path, self.to_html(), "the page of the comparison")

    def __str__(self) -> str:
        """Return it as plain text, one engine a line."""
        lines = [f"{self.model} against {self.reference}, input {self.inputs}"]
        for row in self.rows:
            lines.append(f"  {row.engine}@{row.device} ({row.precision}): {row.status}: {row.reason}")
            if row.divergence is not None:
                lines.append(f"    {row.divergence}")
            if row.drift is not None:
                lines.append(f"    {row.drift}")
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __rich__(self) -> RenderableType:
        """Return it as a table, and the divergences below."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from xpuruntime.evidence.render_text.tables import duration_text

        table = Table(
            box=SIMPLE_HEAD, title=f"{self.model} against {self.reference}, input {self.inputs}", title_justify="left"
        )
        for column in ("engine", "precision", "max abs", "max rel", "cosine", "median", "verdict"):
            table.add_column(
                column,
                overflow="fold",
                no_wrap=column in ("engine", "precision", "median"),
                justify="right" if column[:3] in ("max", "cos", "med") else "left",
            )
        for row in self.rows:
            numbers = [
                "-" if value is None else format(value, form)
                for value, form in (
                    (row.max_abs, ".3g"),
                    (row.max_rel, ".3g"),
                    (row.cosine, ".5f"),
                )
            ]
            numbers.append("-" if row.median_us is None else duration_text(row.median_us))
            table.add_row(Text(f"{row.engine}@{row.device}"), row.precision, *numbers, row.status)
        return Group(table, *(Text(line) for row in self.rows for line in _story(row)))


def _story(row: EngineRow) -> list[str]:
    """Return what a table has no room for."""
    head = f"{row.engine}@{row.device}: "
    lines = [] if row.status == "agrees" else [f"{head}{row.status}: {row.reason}"]
    if row.divergence is not None:
        lines.append(f"{head}{row.divergence}")
    if row.drift is not None:
        lines.append(f"{head}{row.drift}")
    return lines + [f"{head}{note}" for note in row.notes]
