# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`render_page` and `render_fragment`: a report as a page, and in a notebook.

Names recur hundreds of times in a large model, so units and source nodes of the page are columns of indices into one
list of strings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.evidence.cuda_graphs import status_text
from xpuruntime.evidence.determinism import determinism_rows
from xpuruntime.evidence.kernel_records import KernelDecision, summed, tensor_cores_text
from xpuruntime.evidence.memory_over_time import most_by_owner
from xpuruntime.evidence.page.document import assemble
from xpuruntime.evidence.render_text.changes import outside_text
from xpuruntime.evidence.render_text.sections import graph_rows, live_text, memory_rows, shape_rows, why_text
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table

if TYPE_CHECKING:
    from xpuruntime.evidence.records import Boundary, Observation, Time, Unit
    from xpuruntime.evidence.report import Report

#: The parts of the script of a report, in the order in which they build on each other.
PARTS = (
    "elements", "core", "overview", "charts", "timeline", "sorting", "units", "memory", "sections", "tables", "groups",
    "columns", "layout", "paint", "pixels", "graph", "inspector", "shell", "main",
)  # fmt: skip

#: Deviations first, then what was not compared or seen.
_ORDER = {"substituted": 0, "unsupported": 1, "inconclusive": 2, "fallback": 3, "unobservable": 4, "honoured": 5}
_WORDS = (
    "id", "op", "relation", "engine", "device", "provider", "kernel", "kernel_source", "precision_requested",
    "precision_run", "layout", "placement_reason", "placement_source", "status",
)  # fmt: skip
_LISTS = ("source_nodes", "outputs", "serves")


def render_page(report: Report) -> str:
    """Return the whole page. It loads nothing, from nowhere, and shows all text of the report as text."""
    title = f"{report.headline} - {model_name(report)}"
    return assemble("page.html", "report", PARTS, title, page_data(report), render_fragment(report))


def _deviations(report: Report) -> list[dict[str, str]]:
    """Return the keys that deviate, each with what to do about it: the plan's fix, where it has one."""
    controls = report.plan.get("controls")
    rows = [control for control in controls if isinstance(control, dict)] if isinstance(controls, list) else []
    fixes = {str(row.get("key")): row.get("fix") for row in rows}
    return [
        {
            **{name: getattr(observation, name) for name in ("key", "requested", "observed", "reason")},
            "fix": str(
                fixes.get(observation.key)
                or f"state mode: strict, so that such a session is refused, or change {observation.key}"
            ),
        }
        for observation in ordered(report.deviations)
    ]


def page_data(report: Report) -> dict[str, Any]:
    """Return plain dicts, lists and scalars; `page/js/core.js` reads them."""
    names = _Names()
    plan = report.plan
    return {
        "headline": report.headline,
        "honoured": report.honoured,
        "partial": report.partial,
        "deviations": _deviations(report),
        "created": report.created,
        "command": report.command,
        "schema": report.schema,
        "plan": {
            key: plan.get(key)
            for key in ("engine", "engine_version", "device", "precision", "mode", "request_hash", "execution_hash")
        },
        "model": _model(plan),
        "policy": plan.get("policy"),
        "policy_source": plan.get("policy_source"),
        "verdicts": plan.get("verdicts") or [],
        "latency": None if report.latency is None else msgspec.to_builtins(report.latency),
        "outside": _outside(report),
        "observations": [msgspec.to_builtins(o) for o in ordered(report.observations)],
        "kinds": _kinds(report),
        "timeline": _timeline(report, names),
        "units": _units(report, names),
        "graph": _graph(report, names),
        "device_kernels": _device_kernels(report, names),
        "decisions": [_decision(d) for d in report.decisions],
        "boundaries": [_boundary(b) for b in report.boundaries],
        "conversions": [msgspec.to_builtins(c) for c in report.conversions],
        "memory": list(report.memory.items()),
        "memory_over_time": _memory_over_time(report),
        "live": _live(report),
        "cuda_graph": _cuda_graph(report),
        "shapes": _shapes(report),
        "determinism": _determinism(report),
        "environment": report.environment,
        "libraries": [msgspec.to_builtins(library) for library in report.libraries],
        "notes": list(report.notes),
        "strings": names.all,
    }


def ordered(observations: Iterable[Observation]) -> list[Observation]:
    """Return policy keys with those that deviate first, else in their own order."""
    return sorted(observations, key=lambda o: _ORDER[o.status])


def model_name(report: Report) -> str:
    """Return the last part of the model's path, or ``"a model"``."""
    model = report.plan.get("model")
    path = str(model.get("path") or "") if isinstance(model, dict) else ""
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or "a model"


def _outside(report: Report) -> dict[str, Any] | None:
    run = {} if report.latency is None else report.latency.detail.get("instrumented", {})
    if "outside_us" not in run:
        return None
    return {"text": outside_text(run), "us": run["outside_us"]}


class _Names:
    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str | None) -> int:
        if text is None:
            return -1
        result = self._places.setdefault(text, len(self.all))
        if result == len(self.all):
            self.all.append(text)
        return result

    def places(self, texts: Iterable[str]) -> list[int]:
        return [self.place(text) for text in texts]


def _model(plan: dict[str, Any]) -> dict[str, Any]:
    model = plan.get("model")
    if not isinstance(model, dict):
        return {}
    return {key: model.get(key) for key in ("path", "sha256", "size", "nodes", "inputs", "outputs", "opsets")}


def _kinds(report: Report) -> list[dict[str, Any]]:
    """Return each kind of time with its unit; times of different ones are never added up."""
    counts: dict[tuple[str, str], int] = {}
    for unit in report.units:
        if unit.time is not None:
            key = (unit.time.unit, unit.time.kind)
            counts[key] = max(counts.get(key, 0), unit.time.runs)
    return [{"unit": unit, "kind": kind, "runs": runs} for (unit, kind), runs in counts.items()]


def _units(report: Report, names: _Names) -> dict[str, list[Any]]:
    kinds = {(kind["unit"], kind["kind"]): i for i, kind in enumerate(_kinds(report))}
    columns: dict[str, list[Any]] = {name: [names.place(getattr(u, name)) for u in report.units] for name in _WORDS}
    columns |= {name: [names.places(getattr(u, name)) for u in report.units] for name in _LISTS}
    times: list[Time | None] = [u.time for u in report.units]
    columns["time"] = [None if t is None else float(f"{t.value:.7g}") for t in times]
    columns["kind"] = [-1 if t is None else kinds[t.unit, t.kind] for t in times]
    columns["runs"] = [0 if t is None else t.runs for t in times]
    return columns


def _timeline(report: Report, names: _Names) -> dict[str, Any] | None:
    """Return columns: the place of the unit in the report, -1 for none, the name, kind, lane, start and duration."""
    timeline = report.timeline
    if timeline is None:
        return None
    places = {unit.id: index for index, unit in enumerate(report.units)}
    return {
        "run_us": round(timeline.run_us, 3),
        "unit": [places.get(span.unit, -1) for span in timeline.spans],
        "name": [names.place(span.name) for span in timeline.spans],
        "kind": [names.place(span.kind) for span in timeline.spans],
        "lane": [names.place(span.lane) for span in timeline.spans],
        "start": [round(span.start_us, 3) for span in timeline.spans],
        "us": [round(span.us, 3) for span in timeline.spans],
    }


def _device_kernels(report: Report, names: _Names) -> dict[str, Any]:
    sums = summed(report.units)
    places = {(share.kind, share.name): index for index, share in enumerate(sums)}
    return {
        "all": [
            {
                "name": names.place(sum_.name),
                "short": names.place(sum_.short),
                "kind": sum_.kind,
                "times": round(sum_.times, 3),
                "us": float(f"{sum_.us:.6g}"),
                "share": sum_.share,
                "math": tensor_cores_text(sum_.tensor_cores, sum_.precision),
                "units": names.places(sum_.units),
            }
            for sum_ in sums
        ],
        "of": [
            [
                [places[kernel.kind, kernel.name], round(kernel.count, 3), float(f"{kernel.us:.6g}")]
                for kernel in unit.device_kernels
            ]
            for unit in report.units
        ]
        if sums
        else [],
    }


def _graph(report: Report, names: _Names) -> dict[str, list[Any]]:
    makers = {output: i for i, node in enumerate(report.graph) for output in node.outputs}
    reads = [sorted({makers[n] for n in node.inputs if n in makers} - {i}) for i, node in enumerate(report.graph)]
    return {
        "name": [names.place(node.name) for node in report.graph],
        "op": [names.place(node.op) for node in report.graph],
        "reads": reads,
    }


def _decision(decision: KernelDecision) -> dict[str, Any]:
    others = [
        {
            "kernel": other.kernel,
            "can": other.accepted,
            "reason": other.reason,
            "us": other.measured_us,
        }
        for other in decision.candidates
    ]
    return {
        "call": decision.description,
        "nodes": list(decision.nodes),
        "module": decision.module,
        "asked": list(decision.asked),
        "ran": decision.kernel,
        "why": why_text(decision),
        "replaced": decision.source == "fallback",
        "others": others,
        "notes": list(decision.notes),
        "count": decision.count,
    }


def _memory_over_time(report: Report) -> dict[str, Any]:
    """Return the checkpoints, and for each owner its bytes at each of them, the most and when that was."""
    samples = report.memory_over_time
    owners = [
        [owner, [sample.owners.get(owner) for sample in samples], most, moment]
        for owner, (most, moment) in most_by_owner(samples).items()
    ]
    return {
        "moments": [sample.moment for sample in samples],
        "at_us": [round(sample.at_us, 1) for sample in samples],
        "owners": owners,
    }


def _live(report: Report) -> dict[str, list[int]]:
    places = {unit.id: index for index, unit in enumerate(report.units)}
    return {
        "unit": [places.get(memory.unit, -1) for memory in report.live],
        "during": [memory.during for memory in report.live],
        "after": [memory.after for memory in report.live],
    }


def _cuda_graph(report: Report) -> dict[str, Any] | None:
    status = report.cuda_graph
    if status is None:
        return None
    return {
        "status": status.status,
        "word": status_text(status),
        "asked": status.asked,
        "reason": status.reason,
        "blockers": [list(row) for row in graph_rows(status)],
        "holds_for": list(status.holds_for),
    }


def _shapes(report: Report) -> dict[str, Any] | None:
    coverage = report.shapes
    if coverage is None:
        return None
    return {"inputs": [list(row) for row in shape_rows(coverage)], "by_shape": list(coverage.by_shape)}


def _determinism(report: Report) -> dict[str, Any] | None:
    tests = report.determinism
    if tests is None:
        return None
    marks = {"passed": "honoured", "failed": "substituted"}
    return {
        "headline": tests.headline,
        "inputs": tests.inputs,
        "marks": [marks.get(test.verdict, "unobservable") for test in tests.tests],
        "tests": [list(row) for row in determinism_rows(tests)],
    }


def _boundary(boundary: Boundary) -> dict[str, Any]:
    results: dict[str, Any] = msgspec.to_builtins(boundary)
    return results


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
