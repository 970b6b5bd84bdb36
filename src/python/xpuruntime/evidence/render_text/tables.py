# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tables of differences, and figures as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.difference import difference_rows
from xpuruntime.tables import rows_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from xpuruntime.evidence.difference import Difference
    from xpuruntime.evidence.records import Time

__all__ = ["arrow_text", "cut_text", "difference_table", "duration_text", "outside_text", "time_text"]

_HEADS = {"reason": "why", "restore": "restored by"}
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
) -> list[RenderableType]:
    """Return a table of differences: what differs, both values, and more fields by name."""
    rows = difference_rows(differences, *fields)
    if cut:
        rows = [tuple(map(cut_text, row)) for row in rows]
    columns = ("what", "before", "after", *(_HEADS[name] for name in fields))
    return rows_table(title, columns, rows, most=most, noun="more rows")


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
