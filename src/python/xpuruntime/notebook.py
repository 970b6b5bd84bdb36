# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records as text, and as HTML for Jupyter: tables and lines in one style, without a script.

All text is escaped, and the style holds for the fragment alone, so that names from a model cannot become markup.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.printable import escape_console, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: Color of the terminal to the class that says the same.
_CLASSES = {"green": "xrt-honoured", "red": "xrt-substituted", "yellow": "xrt-unobservable"}
#: Longer text is colored, but is no badge, which does not wrap.
_BADGE = 24
#: Characters of a headline in a `repr`.
_LINE = 100


def one_line(record: object) -> str:
    """Return the `repr` of a record: its kind, the model that it is of, and its headline, else how its text begins."""
    told = getattr(record, "headline", None) or next(filter(str.strip, str(record).splitlines()), "").strip()
    told = told if len(told) <= _LINE else f"{told[: _LINE - 3]}..."
    return printable(f"<{type(record).__name__}{f' of {path}' if (path := model_path(record)) else ''}: {told}>")


def model_path(record: object) -> str:
    """Return the path of the model that a record is of, or nothing."""
    model = getattr(record, "model", "")
    return str(model if isinstance(model, str) else getattr(model, "path", ""))


class Badge(str):
    """A status, to be shown as such."""

    __slots__ = ()


@functools.cache
def fragment_style() -> str:
    """Return the style of a fragment, which takes colors and fonts of the page around it."""
    return (Path(__file__).parent / "notebook.css").read_text(encoding="utf-8")


def plain(shown: RenderableType, width: int = 80) -> str:
    """Return what rich shows as text without colors or control codes, `width` columns wide at most."""
    from rich.console import Console

    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,  # it would show the text as the result of the cell, and leave the stream empty
    )
    escape_console(console).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def fragment(parts: Iterable[str]) -> str:
    """Return parts of HTML as one fragment, with its style."""
    return f"<div class='xrt-report'><style>{fragment_style()}</style>{''.join(parts)}</div>"


def fragment_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of text, with its caption. A leading ``>`` sets a column to the right."""
    head = "".join(f"<th scope='col'{_side(name)}>{escaped(name.removeprefix('>'))}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(_cell(value, name) for value, name in zip(row, columns, strict=True))}</tr>" for row in rows
    )
    return f"<table><caption>{escaped(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def fragment_lines(lines: Iterable[str]) -> str:
    """Return lines of text, each a paragraph."""
    return "".join(f"<p class='xrt-line'>{escaped(line)}</p>" for line in lines)


def escaped(text: object) -> str:
    """Return text as HTML, with control characters as escapes."""
    import html

    return html.escape(printable(str(text)))


def rich_fragment(shown: RenderableType) -> str:
    """Return what rich shows in a terminal as a fragment: groups, tables and text."""
    return fragment(_parts(shown, _console()))


def _side(name: str) -> str:
    return " class='xrt-number'" if name.startswith(">") else ""


def _cell(value: str, column: str) -> str:
    if isinstance(value, Badge):
        return f"<td><span class='xrt-badge xrt-{escaped(value)}'>{escaped(value)}</span></td>"
    return f"<td{_side(column)}>{escaped(value)}</td>"


def _console() -> Console:
    from rich.console import Console

    return Console(file=io.StringIO(), width=120, markup=False, highlight=False, emoji=False, force_jupyter=False)


def _parts(shown: RenderableType, console: Console) -> list[str]:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(shown, Group):
        return [part for renderable in shown.renderables for part in _parts(renderable, console)]
    if isinstance(shown, Table):
        return [_table(shown, console)]
    if isinstance(shown, str):
        shown = Text(shown)
    if not isinstance(shown, Text):
        msg = f"no HTML for {type(shown).__name__}: records are groups, tables and text"
        raise TypeError(msg)
    colour = next((cls for name, cls in _CLASSES.items() if shown.style == f"bold {name}"), None)
    if colour is not None:
        return [f"<p class='xrt-headline {colour}'>{escaped(shown.plain.strip())}</p>"]
    return [f"<p class='xrt-line'>{_text(shown, console)}</p>"]


def _table(shown: Table, console: Console) -> str:
    sides = [" class='xrt-number'" if column.justify == "right" else "" for column in shown.columns]
    parts = []
    if shown.title:
        parts.append(f"<caption>{escaped(shown.title).strip()}</caption>")
    if shown.show_header:
        cells = (
            f"<th scope='col'{side}>{escaped(column.header)}</th>"
            for column, side in zip(shown.columns, sides, strict=True)
        )
        parts.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
    body = []
    for row in zip(*(column.cells for column in shown.columns), strict=True):
        cells = (f"<td{side}>{_text(cell, console, badges=True)}</td>" for cell, side in zip(row, sides, strict=True))
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(parts)}<tbody>{''.join(body)}</tbody></table>"


def _text(shown: RenderableType, console: Console, *, badges: bool = False) -> str:
    """Return text with its colors; those of a table's cell as badges where they are short."""
    from rich.text import Text

    text = shown if isinstance(shown, Text) else Text(str(shown))
    parts = []
    for segment in text.render(console):
        style = segment.style
        classes = []
        if style is not None and style.color is not None and style.color.name in _CLASSES:
            classes.append(_CLASSES[style.color.name])
            if badges and len(segment.text) <= _BADGE:
                classes.append("xrt-badge")
        if style is not None and style.dim:
            classes.append("xrt-dim")
        said = escaped(segment.text)
        if style is not None and style.bold:
            said = f"<b>{said}</b>"
        parts.append(f"<span class='{' '.join(classes)}'>{said}</span>" if classes else said)
    return "".join(parts).strip("\n")
