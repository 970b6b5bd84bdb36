# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tables and figures as the terminal shows them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Union

from xpuruntime.evidence.difference import difference_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from xpuruntime.evidence.difference import Difference
    from xpuruntime.evidence.records import Time

__all__ = [
    "ROWS",
    "Cell",
    "arrow_text",
    "cut_text",
    "difference_table",
    "duration_text",
    "outside_text",
    "rows_table",
    "table",
    "time_text",
]

#: Rows that a table shows; all of them are in the JSON.
ROWS = 12
Cell = Union[str, "tuple[str, str]"]
_HEADS = {"reason": "why", "restore": "restored by"}
_WIDTHS = {"key": 19, "observed": 11, "status": 12}


def table(title: str, columns: tuple[str, ...], *, widths: Mapping[str, int] = _WIDTHS, dense: bool = False) -> Table:
    """Return a table that folds long words, so that it fits any width. A leading ``>`` sets a column to the right."""
    from rich import box

    result = _fitted_table()(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0) if dense else (0, 1),
        pad_edge=False,
    )
    for name in columns:
        right = name.startswith(">")
        result.add_column(
            name.lstrip(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=dense and right,
            min_width=widths.get(name),
        )
    return result


def rows_table(
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[Sequence[Cell]],
    *,
    most: int | None = ROWS,
    noun: str = "more",
    widths: Mapping[str, int] = _WIDTHS,
) -> list[RenderableType]:
    """Return a table of rows, and where these are more than `most` how many are left out; nothing without any row.

    A cell is text, or text with its style.
    """
    from rich.text import Text

    every = list(rows)
    if not every:
        return []
    shown = table(title, columns, widths=widths)
    for row in every[:most]:
        shown.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    left = 0 if most is None else len(every) - most
    return [shown, *([Text(f"and {left} {noun}: all of them are in the JSON")] if left > 0 else [])]


#: Characters of a value that a table shows.
_LONG = 56


def cut_text(text: str) -> str:
    """Return the beginning of a long value."""
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."


def difference_table(
    title: str,
    differences: Sequence[Difference],
    *fields: str,
    most: int | None = None,
    cut: bool = False,
    widths: Mapping[str, int] = _WIDTHS,
) -> list[RenderableType]:
    """Return a table of differences: what differs, both values, and more fields by name."""
    rows = difference_rows(differences, *fields)
    if cut:
        rows = [tuple(map(cut_text, row)) for row in rows]
    columns = ("what", "before", "after", *(_HEADS[name] for name in fields))
    return rows_table(title, columns, rows, most=most, noun="more rows", widths=widths)


@functools.cache
def _fitted_table() -> type[Table]:
    from rich.table import Table

    class FittedTable(Table):
        """A table that is no wider than its console: rich crops text where least widths leave no room."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            _fit(self, console, options)
            yield from super().__rich_console__(console, options)

    return FittedTable


def _fit(shown: Table, console: Console, options: ConsoleOptions) -> None:
    """Set the widths of columns where they do not all fit: the widest give way first, down to their least width."""
    from rich.measure import Measurement

    columns = shown.columns
    padding = shown.padding[1] + shown.padding[3]
    room = options.max_width - len(columns) * (padding + 1) - 1
    maximums = [
        max(Measurement.get(console, options, cell).maximum for cell in (column.header, *column.cells))
        for column in columns
    ]
    if sum(maximums) <= room:
        for column in columns:
            column.width = None
        return
    least = [
        width if column.no_wrap else min(width, column.min_width or 8)
        for width, column in zip(maximums, columns, strict=True)
    ]
    for _ in range(sum(maximums) - room):
        indexes = [index for index, width in enumerate(maximums) if width > least[index]] or range(len(maximums))
        widest = max(indexes, key=lambda index: maximums[index])
        maximums[widest] = max(1, maximums[widest] - 1)
    for column, width in zip(columns, maximums, strict=True):
        column.width = width


def arrow_text(before: str | None, after: str | None) -> str:
    """Say what a value was and is; once where it is the same."""
    a, b = before if before is not None else "not stated", after if after is not None else "not stated"
    return a if a == b else f"{a} -> {b}"


def duration_text(us: float) -> str:
    """Return a time in the unit that suits it: ``410.0 us``, ``177.7 ms``, ``2.1 s``."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= size:
            return f"{us / size:,.1f} {unit}"
    return f"{us:.1f} us"


def time_text(value: Time | None) -> str:
    """Return a time with its unit; ``?`` where it is not known."""
    if value is None:
        return "?"
    return duration_text(value.value) if value.unit == "us" else f"{value.value:,.1f} {value.unit}"


def outside_text(times: Mapping[str, Any]) -> str:
    """Return what a table calls the time that no unit has."""
    measured = times.get("outside", {})
    parts = [f"call {measured['call']:,.1f}"] if "call" in measured else []
    if "between" in measured:
        parts.append(f"between units {measured['between']:,.1f}")
    if "cut_us" in times:
        parts.append(f"cut off at most {times['cut_us']:,.1f}")
    return f"outside of units ({', '.join(parts)})" if parts else "outside of units"
