# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is printed: bytes with their unit, texts of exceptions in one line, and names, never obeyed.

Names are of models, policies, reports and plugins. C0 and C1 controls except tab and newline, the marks that reorder
text (bidi controls) and lone surrogates become an escape such as u001b, text for a terminal, HTML and JSON alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderResult
    from rich.measure import Measurement

#: Columns of what is no terminal, such as a pipe or the log of a job: no line of it is wrapped.
UNBOUNDED = 100_000
#: Compiled at the first use, as imports are in every process.
_CONTROLS = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"


def printable(text: str) -> str:
    r"""Return text in which control characters are escapes, such as ``\u001b``; tab and newline stay."""
    if text.isprintable():  # as nearly all is, and compiling the pattern takes a while
        return text
    return re.sub(_CONTROLS, lambda match: f"\\u{ord(match.group()):04x}", text)


def bytes_text(value: int | None) -> str:
    """Return bytes in the unit that suits them; ``?`` where they are not known."""
    if value is None:
        return "?"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def escape_console(console: Console) -> Console:
    """Let a console of rich escape the control characters of what it prints, and return it."""
    console.push_render_hook(_Hook())  # type: ignore[arg-type] # rich is not imported before it is used
    return console


class _Hook:
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    """Something for a console, with its text escaped after it was laid out; colors stay."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments(console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement.get(console, options, self._shown)

    def _segments(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.segment import Segment

        for segment in console.render(self._shown, options):
            if segment.control is None and re.search(_CONTROLS, segment.text):
                yield Segment(printable(segment.text), segment.style)  # type: ignore[misc]
            else:
                yield segment  # type: ignore[misc]


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank; empty where there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def error_line(error: BaseException, *, named: bool = False) -> str:
    """Return the first line of an exception's text, or the name of its type where it has none."""
    name, line = type(error).__name__, first_line(str(error))
    if not line:
        return name
    return f"{name}: {line}" if named else line
