# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory over time, CUDA graphs and shapes as the terminal shows them, and as rows for other renderers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import arrow_text, bytes_text, table
from xpuruntime.evidence.sections.graph_status import status_text
from xpuruntime.evidence.sections.memory_over_time import most_by_owner, most_live
from xpuruntime.evidence.sections.shape_coverage import covered_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from xpuruntime.evidence.report import Report
    from xpuruntime.evidence.report_comparison import GraphChange, MemoryChange, ShapeChange
    from xpuruntime.evidence.sections.graph_status import GraphStatus
    from xpuruntime.evidence.sections.shape_coverage import ShapeCoverage

__all__ = [
    "changed_graph",
    "changed_memory",
    "changed_shapes",
    "graph_change_rows",
    "graph_rows",
    "graph_tables",
    "live_text",
    "memory_change_rows",
    "memory_rows",
    "memory_tables",
    "shape_change_rows",
    "shape_rows",
    "shape_tables",
]

_ROWS = 12
_STYLE = {"captured": "green", "possible": "green", "blocked": "bold red", "refused": "bold red", "unknown": "yellow"}


def memory_rows(report: Report) -> list[tuple[str, ...]]:
    """Return a row for each owner: held before the pass, at most, at which checkpoint, and after the pass."""
    samples = report.memory_over_time
    if not samples:
        return []
    first, last = samples[0].owners, samples[-1].owners
    return [
        (owner, _held(first.get(owner)), bytes_text(most), moment, _held(last.get(owner)))
        for owner, (most, moment) in most_by_owner(samples).items()
    ]


def live_text(report: Report) -> str | None:
    """Return in one sentence how much the tensors between units need, where; ``None`` where that is not reported."""
    most = most_live(report.live)
    if most is None:
        return None
    place = report.live.index(most) + 1
    return (
        f"tensors between units: at most {bytes_text(most.during)}, around {most.unit} (unit {place} of "
        f"{len(report.live)}); weights and the model's inputs are not counted"
    )


def memory_tables(report: Report) -> list[RenderableType]:
    """Return who held how much during the pass, and what is live between units."""
    from rich.text import Text

    parts: list[RenderableType] = []
    rows = memory_rows(report)
    if rows:
        made = table(
            f"memory over time, at {len(report.memory_over_time)} checkpoints (owners overlap)",
            ("owner", ">before", ">most", "after what", ">at last"),
        )
        for owner, before, most, moment, after in rows:
            made.add_row(Text(owner), before, most, Text(moment), after)
        parts.append(made)
    live = live_text(report)
    if live is not None:
        parts.append(Text(("" if rows else "\n") + live))
    return parts


def graph_rows(status: GraphStatus) -> list[tuple[str, ...]]:
    """Return a row for each blocker of a graph."""
    return [(one.node, one.op, one.kind.replace("_", " "), one.reason) for one in status.blockers]


def graph_tables(status: GraphStatus | None) -> list[RenderableType]:
    """Return the status in a line, and what prevents a graph."""
    from rich.text import Text

    if status is None:
        return []
    if status.status == "not_applicable":
        return [Text(f"\ncuda graph: {status.reason}")]
    line = Text.assemble(
        ("\ncuda graph: ", "bold"), (status_text(status), _STYLE[status.status]), f" (asked: {status.asked}). ",
        status.reason,
    )  # fmt: skip
    parts: list[RenderableType] = [line]
    if status.blockers:
        made = table("what prevents a graph", ("node", "op", "what", "why"))
        rows = graph_rows(status)
        for row in rows[:_ROWS]:
            made.add_row(*(Text(cell) for cell in row))
        parts.append(made)
        if len(rows) > _ROWS:
            parts.append(Text(f"and {len(rows) - _ROWS} more: all of them are in the JSON"))
    parts += [Text(f"a graph holds for {text}") for text in status.holds_for]
    return parts


def shape_rows(coverage: ShapeCoverage) -> list[tuple[str, ...]]:
    """Return a row for each input: what the model has, what is allowed, what was seen, whether that is all, and why."""
    return [(one.input, one.model, one.allowed, one.observed, covered_text(one), one.reason) for one in coverage.inputs]


def shape_tables(coverage: ShapeCoverage | None) -> list[RenderableType]:
    """Return the shapes that the report covers."""
    from rich.text import Text

    if coverage is None or not coverage.inputs:
        return []
    made = table("shapes that this report covers", ("input", "allowed", "observed", "all of them", "why"))
    rows = shape_rows(coverage)
    for name, _, allowed, observed, covered, reason in rows[:_ROWS]:
        made.add_row(
            Text(name), Text(allowed), Text(observed), Text(covered, "" if covered == "yes" else "yellow"), Text(reason)
        )
    parts: list[RenderableType] = [made]
    if len(rows) > _ROWS:
        parts.append(Text(f"and {len(rows) - _ROWS} more inputs: all of them are in the JSON"))
    return [*parts, *(Text(text) for text in coverage.by_shape)]


def memory_change_rows(changes: Sequence[MemoryChange]) -> list[tuple[str, ...]]:
    """Return a row for each owner: before and after."""
    return [(one.owner, _held(one.before), _held(one.after)) for one in changes]


def changed_memory(changes: Sequence[MemoryChange], title: str) -> list[RenderableType]:
    """Return a table of owners that hold another number of bytes."""
    return _table(title, ("owner", ">before", ">after"), memory_change_rows(changes))


def graph_change_rows(change: GraphChange | None) -> list[tuple[str, ...]]:
    """Return the status, and what came into the way of a graph or left it."""
    if change is None:
        return []
    words = [one.replace("not_applicable", "does not apply") for one in (change.status_before, change.status_after)]
    rows: list[tuple[str, ...]] = [("status", arrow_text(*words), change.reason)]
    rows += [("no longer a blocker", node, "") for node in change.blockers_gone]
    return rows + [("new blocker", node, "") for node in change.blockers_new]


def changed_graph(change: GraphChange | None) -> list[RenderableType]:
    """Return a table of what differs about CUDA graphs."""
    return _table("cuda graph", ("what", "", "why"), graph_change_rows(change))


def shape_change_rows(changes: Sequence[ShapeChange]) -> list[tuple[str, ...]]:
    """Return a row for each input: allowed and observed."""
    return [
        (
            one.input,
            arrow_text(one.allowed_before, one.allowed_after),
            arrow_text(one.observed_before, one.observed_after),
        )
        for one in changes
    ]


def changed_shapes(changes: Sequence[ShapeChange]) -> list[RenderableType]:
    """Return a table of inputs of which other shapes are allowed, or were run."""
    return _table("shapes", ("input", "allowed", "observed"), shape_change_rows(changes))


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[RenderableType]:
    from rich.text import Text

    if not rows:
        return []
    made = table(title, columns)
    for row in rows[:_ROWS]:
        made.add_row(*(Text(cell) for cell in row))
    more = len(rows) - _ROWS
    return [made, *([Text(f"and {more} more: all of them are in the JSON")] if more > 0 else [])]


def _held(value: int | None) -> str:
    return "-" if value is None else bytes_text(value)
