# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tables of the sections of a report beside units: decisions, operators, CUDA graphs, memory, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xpuruntime.evidence.cuda_graphs import GraphStatus, status_text
from xpuruntime.evidence.memory_over_time import most_by_owner, most_live
from xpuruntime.evidence.shape_coverage import ShapeCoverage, covered_text
from xpuruntime.printable import bytes_text
from xpuruntime.tables import ROWS, rows_table, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.evidence.records import Unit
    from xpuruntime.evidence.report import Report
    from xpuruntime.evidence.report_comparison import DecisionChange, MemoryChange

_OWN = "the engine's own"
_SOURCE_STYLE = {"fallback": "bold red"}
_WHY = {
    "pinned": "as asked",
    "rule": "as a rule asks",
    "tuned": "by measured times",
    "first": "the first that can",
    "fallback": "instead of what was asked",
}


def decision_tables(decisions: Sequence[KernelDecision], title: str) -> list[RenderableType]:
    """Return a table of what served, and one of the kernels that did not, with the reasons."""
    order = sorted(decisions, key=lambda decision: (decision.source != "fallback", -(decision.count or 0)))
    rows = [
        (
            call_text(call),
            ", ".join(call.asked),
            call.kernel or _OWN,
            (why_text(call), _SOURCE_STYLE.get(call.source, "")),
            "-" if call.count is None else f"{call.count:,}",
        )
        for call in order
    ]
    columns = ("call", "asked", "ran", "why", ">calls")
    return [*rows_table(title, columns, rows, noun="more kinds of calls"), *_others(order)]


def changed_decisions(changes: Sequence[DecisionChange]) -> list[RenderableType]:
    """Return a table of the calls that another kernel serves, and why."""
    from rich.text import Text

    rows = [
        (
            call_at(change.description or change.op, change.nodes),
            change.kernel_before,
            change.kernel_after,
            " -> ".join(
                dict.fromkeys(
                    (
                        f"{change.asked_before} ({change.asked_by_before})",
                        f"{change.asked_after} ({change.asked_by_after})",
                    )
                )
            ),
        )
        for change in changes
    ]
    parts = rows_table("calls that another kernel serves", ("call", "before", "after", "asked"), rows)
    return [*parts, *(Text(text) for text in dict.fromkeys(change.reason for change in changes[:ROWS]) if text)]


def call_text(decision: KernelDecision) -> str:
    """Return operation, operands and the first node of a decision in one line."""
    return call_at(decision.description, decision.nodes or ((decision.module,) if decision.module else ()))


def call_at(text: str, places: Sequence[str]) -> str:
    """Return what a call is, with the first of the places where it is made."""
    if not places:
        return text
    return f"{text}; {places[0]}" + (f" + {len(places) - 1} more" if len(places) > 1 else "")


def why_text(decision: KernelDecision) -> str:
    """Return by which key and how the choice was made."""
    return f"{_WHY[decision.source]} ({decision.asked_by})"


def _others(decisions: Sequence[KernelDecision]) -> list[RenderableType]:
    """Return why the other kernels did not run: what was measured first, then what cannot serve."""
    others: dict[tuple[str, str, str, float | None], None] = {}
    for decision in decisions:
        for other in decision.candidates:
            if other.reason or other.measured_us is not None:
                others[other.kernel, decision.op, other.reason or "ran", other.measured_us] = None
    names = {word.partition("@")[0] for decision in decisions for word in decision.asked}

    def weight(row: tuple[str, str, str, float | None]) -> tuple[bool, bool]:
        kernel = row[0].partition("@")[0]
        return row[3] is None, not {kernel, kernel.partition(".")[0]} & names

    rows = [
        (kernel, op, reason, "-" if spent is None else f"{spent:,.2f}")
        for kernel, op, reason, spent in sorted(others, key=weight)
    ]
    title = "what else was considered, and what was measured"
    return rows_table(title, ("kernel", "of", "what became of it", ">us"), rows)


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
    index = report.live.index(most) + 1
    return (
        f"tensors between units: at most {bytes_text(most.during)}, around {most.unit} (unit {index} of "
        f"{len(report.live)}); weights and the model's inputs are not counted"
    )


def memory_tables(report: Report) -> list[RenderableType]:
    """Return who held how much during the pass, and what is live between units."""
    from rich.text import Text

    title = f"memory over time, at {len(report.memory_over_time)} checkpoints (owners overlap)"
    parts = rows_table(title, ("owner", ">before", ">most", "after what", ">at last"), memory_rows(report), most=None)
    live = live_text(report)
    if live is not None:
        parts.append(Text(("" if parts else "\n") + live))
    return parts


def graph_rows(status: GraphStatus) -> list[tuple[str, ...]]:
    """Return a row for each blocker of a graph."""
    return [(blocker.node, blocker.op, blocker.kind.replace("_", " "), blocker.reason) for blocker in status.blockers]


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
    blockers = rows_table("what prevents a graph", ("node", "op", "what", "why"), graph_rows(status))
    return [line, *blockers, *(Text(f"a graph holds for {text}") for text in status.holds_for)]


def shape_rows(coverage: ShapeCoverage) -> list[tuple[str, ...]]:
    """Return a row for each input: what the model has, what is allowed, what was seen, whether that is all, and why."""
    return [
        (input_.input, input_.model, input_.allowed, input_.observed, covered_text(input_), input_.reason)
        for input_ in coverage.inputs
    ]


def shape_tables(coverage: ShapeCoverage | None) -> list[RenderableType]:
    """Return the shapes that the report covers."""
    from rich.text import Text

    if coverage is None or not coverage.inputs:
        return []
    rows = [
        (name, allowed, observed, (covered, "" if covered == "yes" else "yellow"), reason)
        for name, _, allowed, observed, covered, reason in shape_rows(coverage)
    ]
    columns = ("input", "allowed", "observed", "all of them", "why")
    parts = rows_table("shapes that this report covers", columns, rows, noun="more inputs")
    return [*parts, *(Text(text) for text in coverage.by_shape)]


def memory_change_rows(changes: Sequence[MemoryChange]) -> list[tuple[str, ...]]:
    """Return a row for each owner: before and after."""
    return [(change.owner, _held(change.before), _held(change.after)) for change in changes]


def changed_memory(changes: Sequence[MemoryChange], title: str) -> list[RenderableType]:
    """Return a table of owners that hold another number of bytes."""
    return rows_table(title, ("owner", ">before", ">after"), memory_change_rows(changes))


def _held(value: int | None) -> str:
    return "-" if value is None else bytes_text(value)


_TOP = 8


def by_operator(units: Sequence[Unit]) -> RenderableType:
    """Return a table of operators on devices, those with the most time first. Units without a time are left out."""
    from rich.text import Text

    groups: dict[tuple[str, str, str], list[float]] = {}
    for unit in units:
        if unit.time is not None:
            groups.setdefault((unit.op, unit.device, unit.time.unit), []).append(unit.time.value)
    total: dict[str, float] = {}
    for (_, _, measure), values in groups.items():
        total[measure] = total.get(measure, 0.0) + sum(values)
    operator = table("where the time goes, by operator", ("op", "on", ">units", ">time", ">share"))
    order = sorted(groups.items(), key=lambda item: -sum(item[1]) / (total[item[0][2]] or 1.0))
    for (op, device, measure), values in order[:_TOP]:
        spent = sum(values)
        share = spent / total[measure] if total[measure] else 0.0
        operator.add_row(Text(op), Text(device), str(len(values)), f"{spent:,.1f} {measure}", f"{share:.0%}")
    rest = order[_TOP:]
    if rest:
        sums = {measure: 0.0 for (_, _, measure), _ in rest}
        for (_, _, measure), values in rest:
            sums[measure] += sum(values)
        spent_text = ", ".join(f"{value:,.1f} {measure}" for measure, value in sums.items())
        count = sum(len(values) for _, values in rest)
        operator.add_row(Text(f"{len(rest)} others"), "", str(count), spent_text, "")
    return operator
