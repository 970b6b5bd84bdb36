# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of a difference between environments. Every colour stands beside a word that says the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.locks.diff.result import Diff, DiffRow, Level

__all__ = ["render"]

_STYLE = {
    "same": "green",
    "differs": "bold yellow",
    "undecided": "yellow",
    "unobservable": "yellow",
    "not compared": "",
}
_HEAD = {0: "bold green", 1: "bold yellow", 4: "bold yellow"}
#: Rows of a level and node names that are shown; all of them are in the JSON.
_ROWS, _NAMES = 12, 3


def render(diff: Diff) -> RenderableType:
    """Return the headline, and the levels with their rows, causes and pins."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(diff.headline, style=_HEAD[diff.exit_code]),
        Text(f"before: {diff.before}, after: {diff.after}, model: {diff.model}"),
    ]
    for number, level in enumerate(diff.levels):
        reason = f": {level.reason}" if level.reason else ""
        parts.append(Text(f"L{number} {level.name}: {level.verdict}{reason}", style=_STYLE[level.verdict]))
        if level.rows:
            parts += _rows(level)
    parts += [Text(f"note: {note}") for note in diff.notes]
    return Group(*parts)


def _rows(level: Level) -> list[RenderableType]:
    from rich.text import Text

    if level.name == "environment":
        shown = table(level.name, ("what", "before", "after", "restored by"), widths={"what": 30})
    else:
        shown = table(level.name, ("what", "before", "after"), widths={"what": 44})
    for row in level.rows[:_ROWS]:
        cells = (_subject(row), row.before, row.after, *([row.restore or "-"] if level.name == "environment" else ()))
        shown.add_row(*map(Text, cells))
    found: list[RenderableType] = [shown]
    if len(level.rows) > _ROWS:
        found.append(Text(f"and {len(level.rows) - _ROWS} more rows: all of them are in the JSON"))
    if level.name != "environment":
        for causes, restore in dict.fromkeys((row.causes, row.restore) for row in level.rows):
            cause = (
                f"may be caused by {', '.join(causes)}" if causes else "no difference of the environment explains it"
            )
            found.append(Text(f"{cause}{f'; restored by {restore}' if restore else ''}"))
    return found


def _subject(row: DiffRow) -> str:
    names = ", ".join(row.nodes[:_NAMES]) + (f" and {len(row.nodes) - _NAMES} more" if len(row.nodes) > _NAMES else "")
    subject = names or row.id
    return f"{row.what}: {subject}" if row.what else subject
