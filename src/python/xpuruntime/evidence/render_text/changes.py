# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of what differs between two reports; every color stands beside a word that says the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.difference import Difference, difference_rows, listed
from xpuruntime.evidence.render_text.sections import changed_decisions, changed_memory
from xpuruntime.printable import bytes_text
from xpuruntime.tables import Cell, rows_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.evidence.records import Time
    from xpuruntime.evidence.report_comparison import (
        BoundaryChange,
        GroupChange,
        ReportComparison,
        ReportSide,
        TimeChange,
        UnitSide,
        What,
    )

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


#: What differs, as the sentence counts it: of one node, of several.
_COUNTED: tuple[tuple[What, str, str], ...] = (
    ("kernel", "changed kernel", "changed kernel"),
    ("precision", "changed precision", "changed precision"),
    ("layout", "changed layout", "changed layout"),
    ("grouping", "is fused otherwise", "are fused otherwise"),
    ("folding", "is folded in one only", "are folded in one only"),
)
_ROWS = 15
_STYLE = {"slower": "red", "faster": "green", "same": "", "undecided": ""}


def headline(comparison: ReportComparison) -> str:
    """Return one sentence: what moved, what else differs in what ran, and how the speed changed."""
    moved = len(comparison.nodes_that("placement"))
    said = [f"{moved} {'node' if moved == 1 else 'nodes'} moved" if moved else "nothing moved"]
    for what, singular, many in _COUNTED:
        count = len(comparison.nodes_that(what))
        if count:
            node = "" if moved else " node" if count == 1 else " nodes"
            said.append(f"{count}{node} {singular if count == 1 else many}")
    inserted = [op for group in comparison.groups for op in group.what.get("inserted", ())]
    if inserted:
        said.append(f"other {', '.join(inserted[:2])} inserted" + (" and more" if len(inserted) > 2 else ""))
    apart = len(comparison.only_before) + len(comparison.only_after)
    if apart:
        said.append(f"{apart} {'node is' if apart == 1 else 'nodes are'} in one report only")
    keys = sum(key.deviates for key in comparison.keys)
    if keys:
        said.append(f"{keys} {'key' if keys == 1 else 'keys'} changed status")
    calls = len(comparison.decisions)
    if calls and not comparison.nodes_that("kernel"):
        said.append(f"{calls} {'kind' if calls == 1 else 'kinds'} of calls by another kernel")
    borders = sum(boundary.count_before != boundary.count_after for boundary in comparison.boundaries)
    if borders:
        said.append(f"{borders} {'boundary' if borders == 1 else 'boundaries'} changed")
    if comparison.latency is not None and comparison.latency.verdict != "same":
        said.append(_speed(comparison.latency))
    return ", ".join(said)


def render(comparison: ReportComparison) -> RenderableType:
    """Return the comparison as rich renderables."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(comparison.headline, style="bold green" if comparison.same else "bold red"),
        Text(_identity("before", comparison.before)),
        Text(_identity("after", comparison.after)),
    ]
    parts += _speeds(comparison)
    if comparison.groups:
        parts += _groups(comparison)
    elif comparison.unchanged:
        parts.append(Text(f"\nno difference in any of {comparison.unchanged} source nodes"))
    for word, nodes in (("before", comparison.only_before), ("after", comparison.only_after)):
        if nodes:
            parts.append(Text(f"\nonly in {word}: {listed(nodes, 8)}"))
    keys = [
        (
            key.key,
            arrow_text(key.requested_before, key.requested_after),
            arrow_text(key.observed_before, key.observed_after),
            (arrow_text(key.status_before, key.status_after), "bold red" if key.deviates else ""),
        )
        for key in comparison.keys
    ]
    parts += rows_table("policy", ("key", "asked", "observed", "status"), keys, most=None)
    parts += [Text(f"{key.key}: {key.reason}") for key in comparison.keys if key.deviates and key.reason]
    parts += changed_decisions(comparison.decisions)
    columns = ("kind", "where", ">count", ">bytes", ">time")
    parts += rows_table("boundaries, in one run", columns, map(boundary_row, comparison.boundaries), most=None)
    parts += difference_table("cuda graph", comparison.cuda_graph, "reason")
    parts += changed_memory(comparison.memory, "memory")
    parts += changed_memory(comparison.peaks, "peak memory, during the pass")
    parts += difference_table("shapes", comparison.shapes)
    parts += difference_table("environment", comparison.surroundings, cut=True)
    if comparison.notes:
        parts.append(Text("\nnotes", style="bold"))
        parts += [Text(f"- {note}") for note in comparison.notes]
    return Group(*parts)


def boundary_row(border: BoundaryChange) -> tuple[str, ...]:
    """Return kind, place, number, bytes and time of a boundary."""
    sizes = [
        "0 B" if not count else bytes_text(size)
        for count, size in ((border.count_before, border.bytes_before), (border.count_after, border.bytes_after))
    ]
    counts = arrow_text(str(border.count_before), str(border.count_after))
    return border.kind, border.where, counts, arrow_text(*sizes), change_text(border.time)


def _identity(word: str, side: ReportSide) -> str:
    named = "" if side.name == word else f" {side.name},"
    headline = f"{word}:{named} {side.engine}@{side.device}, precision {side.precision}, {side.created or 'undated'}"
    return f"{headline}, {side.headline}" + (" (incomplete)" if side.partial else "")


def _speeds(comparison: ReportComparison) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    if comparison.latency is not None:
        lines.append(Text(f"latency: {change_text(comparison.latency)}", style=_STYLE[comparison.latency.verdict]))
    for total in comparison.totals:
        lines.append(Text(f"all units, {total.kind} time: {change_text(total)}", style=_STYLE[total.verdict]))
    if lines:
        limit = f"{comparison.noise:.0%} or {comparison.noise_us:g} us"
        lines.append(Text(f"(differences up to {limit} are treated as noise)", style="dim"))
    return lines


def _groups(comparison: ReportComparison) -> list[RenderableType]:
    """Return the groups that differ: first those in which something else ran, then by how much the time differs."""
    from rich.text import Text

    def row(group: GroupChange) -> tuple[Cell, ...]:
        verdict = group.time.verdict if group.time else "same"
        return (
            listed(group.nodes, 2) if group.nodes else "(inserted)",
            ", ".join(group.what) or verdict,
            cut_text(units_text(group, group.before)),
            cut_text(units_text(group, group.after)),
            (change_text(group.time), _STYLE[verdict]),
        )

    def weight(group: GroupChange) -> tuple[bool, float]:
        return not group.what, -abs(group.time.after - group.time.before) if group.time else 0.0

    rows = map(row, sorted(comparison.groups, key=weight))
    columns = ("nodes", "what", "before", "after", ">time")
    parts = rows_table(
        "source nodes about which something differs", columns, rows, most=_ROWS, noun="more groups of nodes"
    )
    if comparison.unchanged:
        parts.append(Text(f"nothing differs in {comparison.unchanged} other source nodes"))
    return parts


def units_text(group: GroupChange, units: Sequence[UnitSide]) -> str:
    """Say of units what differs: placement, precision, kernel or layout; else which operators they are."""
    ran = [unit for unit in units if unit.relation != "folded"]
    if not ran:
        return "folded" if units else "none"
    lines = []
    if "placement" in group.what:
        lines.append(_some(f"{u.engine}@{u.device}" for u in ran))
    if "precision" in group.what:
        lines.append(_some(u.precision for u in ran))
    if "kernel" in group.what:
        lines.append(_some(u.kernel for u in ran))
    if "layout" in group.what:
        lines.append(_some(u.layout for u in ran))
    if not lines or {"grouping", "folding", "inserted"} & set(group.what):
        counted = f"{len(ran)} units: " if len(ran) > 1 else ""
        lines.append(counted + _some((u.op for u in ran), " + "))
    return "; ".join(text for text in lines if text)


def _some(values: object, sign: str = ", ") -> str:
    distinct = list(dict.fromkeys(value for value in values if value))  # type: ignore[attr-defined]
    return sign.join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")


def change_text(time: TimeChange | None) -> str:
    """Say of a time what it was and is, and by how much that is slower or faster."""
    if time is None:
        return "?"
    figures = f"{time.before:,.1f} -> {time.after:,.1f} {time.unit}"
    return figures + (", same within noise" if time.verdict == "same" else f", {_speed(time)}")


def _speed(time: TimeChange) -> str:
    if time.verdict == "undecided":
        return "speed cannot be decided"
    if time.change is None:
        return time.verdict
    return f"{abs(time.change):.0%} {time.verdict}".replace("%", " %")
