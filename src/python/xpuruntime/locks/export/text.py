# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of an export."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.locks.export.result import ExportResult

__all__ = ["render"]

_STYLE = {"kept": "green", "weakened": "yellow", "lost": "bold red"}


def render(result: ExportResult) -> RenderableType:
    """Return where it was written, how it is run, a table of the keys, the notes and the proof."""
    from rich.console import Group
    from rich.text import Text

    counts: Counter[str] = Counter(one.outcome for one in result.keys)
    summary = ", ".join(f"{counts[word]} {word}" for word in _STYLE if counts[word]) or "no key is stated"
    parts: list[RenderableType] = [
        Text(f"{result.folder}: {result.model} on {result.engine}@{result.device} as {result.target}"),
        Text(f"policy keys: {summary}"),
    ]
    if result.keys:
        shown = table("keys", ("key", "requested", "in xpuruntime", "here", "why"), widths={"key": 18, "here": 8})
        for one in result.keys:
            row = (Text(one.key), Text(one.requested), Text(one.enforceability))
            shown.add_row(*row, Text(one.outcome, style=_STYLE[one.outcome]), Text(one.reason))
        parts.append(shown)
    parts += [Text(f"note: {note}") for note in result.notes]
    parts.append(Text(f"run it: cd {shlex.quote(result.folder)} && {result.command}"))
    if result.proof is not None:
        parts += [Text(""), result.proof]
    return Group(*parts)
