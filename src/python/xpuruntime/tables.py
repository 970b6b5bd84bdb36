# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The one model of tables: on a terminal they fit its width, and in a pipe a row is a line."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Union

from xpuruntime.printable import UNBOUNDED

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

#: Rows that a table shows; all of them are in the JSON.
ROWS = 12
#: Columns that a row in it keeps to, where cells can go below.
_ROW = 140
Cell = Union[str, "tuple[str, str]"]
#: Columns whose cells are never broken up to `_WORD` characters, as numbers never are.
_SOLID = frozenset({"candidate", "claim", "key", "outcome", "status", "usable here", "verdict"})
_WORD = 44
#: Columns that a text has at least, and where a longer word is broken.
_LEAST = 8
_LINES, _SPACES = re.compile("\n"), re.compile(r"\s+")
_BREAKS = re.compile(r"\s+|(?<=[/._:,@+=|-])(?=[^\s/._:,@+=|-])")


def table(title: str, columns: tuple[str, ...]) -> Table:
    """Return a table that fits any width.

    A leading ``>`` sets a column to the right, which is for numbers; one with a leading ``?`` is left out where there
    is no room for it, the last first, and the table says so. In a pipe a row is one line, and a text that would make it
    long, or has several lines, is below it with the name of its column.
    """
    from rich import box

    result: Table = _fitted_table()(
        {index for index, name in enumerate(columns) if name.startswith("?")},
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for name in (name.removeprefix("?") for name in columns):
        right = name.startswith(">")
        result.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right or name in _SOLID,
        )
    return result


def rows_table(
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[Sequence[Cell]],
    *,
    most: int | None = ROWS,
    noun: str = "more",
) -> list[RenderableType]:
    """Return a table of rows, and where these are more than `most` how many are left out; nothing without any row.

    A cell is text, or text with its style.
    """
    from rich.text import Text

    every = list(rows)
    if not every:
        return []
    shown = table(title, columns)
    for row in every[:most]:
        shown.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    left = 0 if most is None else len(every) - most
    return [shown, *([Text(f"and {left} {noun}: all of them are in the JSON")] if left > 0 else [])]


@functools.cache
def _fitted_table() -> Any:
    from rich.table import Table

    class FittedTable(Table):
        """A table that is no wider than its console: rich crops text where least widths leave no room."""

        def __init__(self, optional: AbstractSet[int], **options: Any) -> None:
            super().__init__(**options)
            self.optional = optional

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            if options.max_width >= UNBOUNDED:
                yield from _in_lines(self, "─" if options.encoding.startswith("utf") else "-")
            else:
                yield from Table.__rich_console__(_fitted(self, self.optional, options.max_width), console, options)

    return FittedTable


def _fitted(shown: Table, optional: AbstractSet[int], room: int) -> Table:
    """Return the table for a width."""
    # What gives way is in this order: blanks between columns, lines of text at spaces, long words at separators,
    # optional columns, and at last any text.
    from rich.text import Text

    cells = _texts(shown)
    lines = [_longest(column, _LINES) for column in cells]
    solid = [column.no_wrap and width <= _WORD for column, width in zip(shown.columns, lines, strict=True)]
    words, pieces, least = (
        [width if firm else min(width, limit) for width, firm, limit in zip(lines, solid, limits, strict=True)]
        for limits in (
            [_longest(column, _SPACES) for column in cells],
            [_longest(column, _BREAKS) for column in cells],
            [_LEAST] * len(cells),
        )
    )
    kept = list(range(len(cells)))
    while True:
        tried = ((2, lines), (1, lines), (1, words), (1, pieces))
        fits = (pair for pair in tried if sum(pair[1][i] for i in kept) + len(kept) * (pair[0] + 1) <= room)
        padding, floor = next(fits, (1, least))
        dropped = [index for index in kept if index in optional]
        if floor is not least or not dropped:
            break
        kept.remove(dropped[-1])
    widths = {index: min(lines[index], max(room, 1)) for index in kept}
    for _ in range(sum(widths.values()) + len(kept) * (padding + 1) - room):
        wide = (
            [index for index in kept if widths[index] > floor[index]]
            or [index for index in kept if widths[index] > 1 and not solid[index]]
            or kept
        )
        widest = max(wide, key=lambda index: widths[index])
        widths[widest] = max(1, widths[widest] - 1)
    fitted = copy.copy(shown)
    fitted.padding = (0, 1, 0, padding - 1)
    fitted.columns = [
        dataclasses.replace(
            shown.columns[index],
            width=widths[index],
            _index=place,
            _cells=[cell if solid[index] else _broken(cell, widths[index]) for cell in cells[index][1:]],
        )
        for place, index in enumerate(kept)
    ]
    left_out = [str(column.header) for index, column in enumerate(shown.columns) if index not in kept]
    if any(left_out):
        fitted.caption = Text(f"columns that do not fit: {', '.join(filter(None, left_out))}", "dim")
    return fitted


def _texts(shown: Table) -> list[list[Text]]:
    from rich.text import Text

    return [
        [cell if isinstance(cell, Text) else Text(str(cell)) for cell in (column.header, *column.cells)]
        for column in shown.columns
    ]


def _in_lines(shown: Table, rule: str) -> Iterator[Text]:
    """Yield the lines of a table in a pipe: the longest texts leave their rows until these are at most `_ROW` long."""
    from rich.text import Text

    columns = _texts(shown)
    lengths = [[0 if "\n" in cell.plain else cell.cell_len for cell in column] for column in columns]
    widths = [max(column) for column in lengths]
    free = [index for index, column in enumerate(shown.columns) if not column.no_wrap]
    while sum(widths) + 3 * len(widths) > _ROW:
        shorter = {index: [n for n in lengths[index] if lengths[index][0] <= n < widths[index]] for index in free}
        widest = max((index for index in free if shorter[index]), key=lambda index: widths[index], default=None)
        if widest is None:
            break
        widths[widest] = max(shorter[widest])
    yield Text(str(shown.title), "bold")
    for number, row in enumerate(zip(*columns, strict=True)):
        line, below = Text(style="" if number else "bold"), []
        for column, cell, width in zip(shown.columns, row, widths, strict=True):
            if "\n" in cell.plain or cell.cell_len > width:
                below.append(Text.assemble(f"{column.header}: ", cell))
                cell = Text()
            blank = " " * (width - cell.cell_len)
            line += Text.assemble(" ", *((blank, cell) if column.justify == "right" else (cell, blank)), "  ")
        line.rstrip()
        yield line
        if number == 0:
            yield Text(rule * (sum(widths) + 3 * len(widths)))
        for text in below:
            yield from (Text.assemble("     ", part) for part in text.split("\n"))


def _longest(cells: Iterable[Text], separators: re.Pattern[str]) -> int:
    from rich.cells import cell_len

    return max(cell_len(piece) for cell in cells for piece in separators.split(cell.plain))


def _broken(cell: Text, width: int) -> Text:
    from rich.text import Text

    places = []
    for word in re.finditer(r"\S+", cell.plain):
        if len(word.group()) > width:
            place, filled = word.start(), 0
            for piece in _BREAKS.split(word.group()):
                if filled and filled + len(piece) > width:
                    places.append(place)
                    filled = 0
                place, filled = place + len(piece), filled + len(piece)
    return Text("\n").join(cell.divide(places)) if places else cell
