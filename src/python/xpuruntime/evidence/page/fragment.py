# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`render_fragment`: a report in a notebook. No script; the style holds for the fragment alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.page.data import model_name, ordered
from xpuruntime.evidence.render_text.section_tables import graph_rows, live_text, memory_rows, shape_rows
from xpuruntime.evidence.sections.determinism import determinism_rows
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table

if TYPE_CHECKING:
    from xpuruntime.evidence.records import Unit
    from xpuruntime.evidence.report import Report

__all__ = ["render_fragment"]

_TOP = 8


def render_fragment(report: Report) -> str:
    """Return headline, policy keys, the units that took most of the time, graph, memory, shapes, and notes."""
    parts = [_headline(report)]
    if report.observations:
        rows = [
            (o.key, o.requested, o.resolved, o.observed, Badge(o.status), o.reason)
            for o in ordered(report.observations)
        ]
        parts.append(fragment_table("Policy", ("key", "requested", "resolved", "observed", "status", "reason"), rows))
    parts += _hot(report)
    parts += _sections(report)
    if report.notes:
        parts.append(f"<ul>{''.join(f'<li>{escaped(note)}</li>' for note in report.notes)}</ul>")
    parts.append(
        "<p class='xrt-dim'>The whole report: <code>report.save_html('report.html')</code> or "
        "<code>print(report)</code></p>"
    )
    return fragment(parts)


def _headline(report: Report) -> str:
    kind = "honoured" if report.honoured else "substituted"
    facts = [model_name(report)]
    if report.plan.get("engine"):
        facts.append(f"{report.plan['engine']}@{report.plan.get('device', '?')}")
    if report.latency is not None:
        facts.append(f"median {report.latency.median_us:,.1f} us over {report.latency.runs} runs")
    if report.unobservable:
        facts.append(f"{len(report.unobservable)} of {len(report.observations)} keys could not be observed")
    if report.partial:
        facts.append("incomplete: the observing pass broke off or a source was missing")
    return (
        f"<p class='xrt-headline xrt-{kind}'>{escaped(report.headline)}</p>"
        f"<p class='xrt-dim'>{' · '.join(escaped(fact) for fact in facts)}</p>"
    )


def _hot(report: Report) -> list[str]:
    """Return a table for each kind of time: times of different kinds are not comparable."""
    kinds: dict[tuple[str, str], list[tuple[float, Unit]]] = {}
    for unit in report.units:
        if unit.time is not None:
            kinds.setdefault((unit.time.unit, unit.time.kind), []).append((unit.time.value, unit))
    tables = []
    for (measure, kind), timed in kinds.items():
        total = sum(value for value, _ in timed)
        timed.sort(key=lambda pair: -pair[0])
        rows = [
            (u.id, u.op, u.device, u.precision_run or "?", f"{v:,.1f}", f"{v / total:.0%}" if total else "-")
            for v, u in timed[:_TOP]
        ]
        named = "cycles" if measure == "cycles" else f"{measure}, {kind} time"
        title = f"Where the time goes ({named}; {len(rows)} of {len(timed)} units)"
        tables.append(fragment_table(title, ("unit", "op", "on", "ran in", "time", "share"), rows))
    return tables


def _sections(report: Report) -> list[str]:
    """Return the status of CUDA graphs, memory over time and the shapes that the report speaks of."""
    parts = []
    status = report.cuda_graph
    if status is not None:
        parts.append(f"<p class='xrt-dim'>CUDA graph: {escaped(status.reason)}</p>")
        if status.blockers:
            title = "What prevents a CUDA graph"
            parts.append(fragment_table(title, ("node", "op", "what", "why"), graph_rows(status)[:_TOP]))
    rows = memory_rows(report)
    if rows:
        owners = ("owner", "before", "most", "after what", "at last")
        parts.append(fragment_table("Memory over time (owners overlap)", owners, rows))
    live = live_text(report)
    if live is not None:
        parts.append(f"<p class='xrt-dim'>{escaped(live)}</p>")
    if report.shapes is not None and report.shapes.inputs:
        columns = ("input", "in the model", "allowed", "observed", "all of them", "why")
        parts.append(fragment_table("Shapes that this report covers", columns, shape_rows(report.shapes)[:_TOP]))
    if report.determinism is not None:
        tested = ("grade", "verdict", "trials", "why")
        parts.append(fragment_table(report.determinism.headline, tested, determinism_rows(report.determinism)))
    return parts
