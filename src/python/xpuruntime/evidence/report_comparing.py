# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compare_reports`: what differs between two reports."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xpuruntime.argument_types import NUMBER, check_types
from xpuruntime.errors import InputError
from xpuruntime.evidence.kernel_records import reported_kernel
from xpuruntime.evidence.records import Latency, Time, Unit
from xpuruntime.evidence.report import Report
from xpuruntime.evidence.report_comparison import (
    BoundaryChange,
    GroupChange,
    KeyChange,
    MemoryChange,
    ReportComparison,
    ReportSide,
    TimeChange,
    TimeVerdict,
    UnitSide,
    What,
)
from xpuruntime.evidence.section_comparing import (
    NodeGroup,
    compare_decisions,
    compare_graphs,
    compare_peaks,
    compare_shapes,
    group_units,
    surroundings,
    untold,
)

ReportLike = Report | str | os.PathLike[str]


def compare_reports(
    before: ReportLike, after: ReportLike, *, noise: float = 0.10, noise_us: float = 1.0
) -> ReportComparison:
    """Say what differs between two reports of one model.

    Units are joined on the source nodes that they stand for. Where a unit stands for several nodes in one report and
    is split in the other, they are compared as one group.

    Parameters
    ----------
    before, after : Report or path
        A path is loaded with `Report.load`.
    noise : float
        Times that differ by at most this share of the first are not called slower or faster.
    noise_us : float
        Nor are those that differ by at most so many microseconds. Cycles have only the share. Larger differences are
        ``"undecided"`` where the runs of a report spread as far, or a report has a single run.

    Returns
    -------
    ReportComparison
        Printable; ``.same``, ``.headline``, ``.to_dict()``, ``.to_json()``.

    Raises
    ------
    InputError
        A file is no report, the reports are of different models and have no source node in common, or a noise is
        negative or not finite.

    Examples
    --------
    >>> import xpuruntime as xrt
    >>> with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    ...     comparison = xrt.compare_reports(session.explain(), session.explain())
    >>> comparison.same
    True
    """
    check_types({"noise": NUMBER, "noise_us": NUMBER}, {"noise": noise, "noise_us": noise_us})
    for name, value in (("noise", noise), ("noise_us", noise_us)):
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{name} must be 0 or more, got {value}; 0.1 and 1.0 are what is used without it")
    reports = [source if isinstance(source, Report) else Report.load(source) for source in (before, after)]
    names = [
        word if isinstance(source, Report) else os.fspath(source)
        for word, source in (("before", before), ("after", after))
    ]
    return _Comparing(reports[0], reports[1], names, noise, noise_us).compare()


class _Comparing:
    def __init__(self, before: Report, after: Report, names: list[str], noise: float, noise_us: float) -> None:
        self.before, self.after, self.names = before, after, names
        self.noise, self.noise_us = noise, noise_us
        self.spreads = [_spread(side.latency) for side in (before, after)]
        self.notes: list[str] = []
        self.nodes = [{n for unit in side.units for n in unit.source_nodes} for side in (before, after)]

    def compare(self) -> ReportComparison:
        self._check_models()
        timed = self._times_compare()
        both = self.nodes[0] & self.nodes[1]
        groups, mixed = [], 0
        for group in group_units(self.before.units, self.after.units):
            what = _what(group, both)
            time = self._time(group.before, group.after) if timed and group.before and group.after else None
            mixed += timed and time is None and all(any(u.time for u in side) for side in (group.before, group.after))
            if what or (time is not None and time.verdict in ("slower", "faster")):
                sides = [tuple(_side(unit) for unit in side) for side in (group.before, group.after)]
                groups.append(GroupChange(nodes=group.nodes, what=what, before=sides[0], after=sides[1], time=time))
        if mixed:
            self.notes.append(f"times of {mixed} groups are of different kinds in the two reports: not compared")
        changed = {node for group in groups for node in group.nodes}
        only = self._only()
        decisions, note = compare_decisions(self.before.decisions, self.after.decisions)
        self.notes += [note for note in (note, untold(self.before, self.after, self.names)) if note]
        return ReportComparison(
            before=_identity(self.before, self.names[0]),
            after=_identity(self.after, self.names[1]),
            noise=self.noise,
            noise_us=self.noise_us,
            groups=tuple(groups),
            unchanged=len(both - changed),
            only_before=only[0],
            only_after=only[1],
            keys=self._keys(),
            boundaries=self._boundaries(timed),
            latency=self._latency() if timed else None,
            totals=self._totals() if timed else (),
            memory=_memory(self.before.memory, self.after.memory),
            surroundings=surroundings(self.before, self.after),
            notes=tuple(self.notes),
            decisions=decisions,
            peaks=compare_peaks(self.before, self.after, self.noise),
            cuda_graph=compare_graphs(self.before, self.after),
            shapes=compare_shapes(self.before, self.after),
        )

    def _check_models(self) -> None:
        digests = [_of_model(report, "sha256") for report in (self.before, self.after)]
        common = len(self.nodes[0] & self.nodes[1])
        known = all(digests)
        if known and digests[0] == digests[1]:
            return
        paths = [_of_model(report, "path") or "a model that it does not name" for report in (self.before, self.after)]
        if not common:
            raise InputError(
                f"these reports are of different models and have no source node in common: '{self.names[0]}' is of "
                f"{paths[0]}, '{self.names[1]}' of {paths[1]}. Fix: compare two reports of one model: run `xrt explain "
                "MODEL --json` twice with the same file."
            )
        if known:
            self.notes.append(
                f"the models are not the same file ({paths[0]}, {paths[1]}); compared are the {common} source nodes "
                "that have the same name in both"
            )

    def _times_compare(self) -> bool:
        inputs = [
            (report.latency.detail if report.latency else {}).get("inputs") for report in (self.before, self.after)
        ]
        if all(inputs) and inputs[0] != inputs[1]:
            self.notes.append(f"the inputs differ ({_shapes(inputs[0])}; {_shapes(inputs[1])}): no time is compared")
            return False
        return True

    def _only(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the nodes of one report alone; what a partial report does not show is not compared with it."""
        groups: list[tuple[str, ...]] = []
        for mine, own, other in ((0, self.before, self.after), (1, self.after, self.before)):
            missing = self.nodes[mine] - self.nodes[1 - mine]
            if missing and other.partial:
                self.notes.append(
                    f"'{self.names[1 - mine]}' is incomplete: {len(missing)} source nodes of '{self.names[mine]}' are "
                    "not in it and are not compared"
                )
                missing = set()
            ordered = dict.fromkeys(n for u in own.units for n in u.source_nodes if n in missing)
            groups.append(tuple(ordered))
        return groups[0], groups[1]

    def _change(self, before: Time, after: Time) -> TimeChange:
        """Compare medians; between those that differ, the nearest ends of what the runs of both took decide."""
        change = after.value / before.value - 1 if before.value else None
        noise = max(self.noise_us if before.unit == "us" else 0.0, self.noise * before.value)
        sides = zip((before, after), self.spreads, strict=True)
        lower, higher = sorted((time.value, time.value * low, time.value * high) for time, (low, high) in sides)
        verdict: TimeVerdict = "slower" if after.value > before.value else "faster"
        if higher[0] - lower[0] <= noise:
            verdict = "same"
        elif before.kind != "simulated" and (min(before.runs, after.runs) < 2 or higher[1] - lower[2] <= noise):
            verdict = "undecided"
        return TimeChange(
            before=before.value, after=after.value, unit=before.unit, kind=before.kind, change=change, verdict=verdict
        )

    def _time(self, before: Iterable[Unit], after: Iterable[Unit]) -> TimeChange | None:
        sums = [_sums(units) for units in (before, after)]
        if sums[0] is None or sums[1] is None or len(sums[0]) != 1 or sums[0].keys() != sums[1].keys():
            return None
        kind = next(iter(sums[0]))
        return self._change(sums[0][kind], sums[1][kind])

    def _totals(self) -> tuple[TimeChange, ...]:
        before, after = _sums(self.before.units), _sums(self.after.units)
        if before is None or after is None:
            self.notes.append("a unit has no time although it ran, so totals are not compared")
            return ()
        if before.keys() != after.keys():
            kinds = [", ".join(f"{unit} ({kind} time)" for unit, kind in side) or "none" for side in (before, after)]
            self.notes.append(
                f"times of units are of different kinds ({kinds[0]}; {kinds[1]}): totals are not compared"
            )
            return ()
        return tuple(self._change(before[kind], after[kind]) for kind in before)

    def _latency(self) -> TimeChange | None:
        before, after = self.before.latency, self.after.latency
        if before is None or after is None:
            return None
        sides = [
            Time(value=latency.median_us, unit="us", kind="wall", runs=latency.runs) for latency in (before, after)
        ]
        change = self._change(sides[0], sides[1])
        if change.verdict == "undecided":
            told = [
                f"{latency.runs} runs of {latency.min_us:,.1f} to {latency.p90_us:,.1f} us"
                for latency in (before, after)
            ]
            self.notes.append(f"the speed cannot be decided from {told[0]} and {told[1]}")
        return change

    def _keys(self) -> tuple[KeyChange, ...]:
        sides = [{o.key: o for o in report.observations} for report in (self.before, self.after)]
        changes = []
        for key in dict.fromkeys((*sides[0], *sides[1])):
            a, b = sides[0].get(key), sides[1].get(key)
            if a is not None and b is not None and (a.status, a.requested) == (b.status, b.requested):
                continue
            changes.append(
                KeyChange(
                    key=key,
                    requested_before=a.requested if a else None,
                    requested_after=b.requested if b else None,
                    observed_before=a.observed if a else None,
                    observed_after=b.observed if b else None,
                    status_before=a.status if a else None,
                    status_after=b.status if b else None,
                    reason=b.reason if b else a.reason if a else "",
                )
            )
        return tuple(changes)

    def _boundaries(self, timed: bool) -> tuple[BoundaryChange, ...]:
        sides = [{(b.kind, b.where): b for b in report.boundaries} for report in (self.before, self.after)]
        changes = []
        for kind, where in dict.fromkeys((*sides[0], *sides[1])):
            a, b = sides[0].get((kind, where)), sides[1].get((kind, where))
            times = (a and a.time, b and b.time)
            time = None
            if timed and times[0] and times[1] and (times[0].unit, times[0].kind) == (times[1].unit, times[1].kind):
                time = self._change(times[0], times[1])
            counts = (a.count if a else 0, b.count if b else 0)
            if counts[0] == counts[1] and (time is None or time.verdict in ("same", "undecided")):
                continue
            changes.append(
                BoundaryChange(
                    kind=kind,
                    where=where,
                    count_before=counts[0],
                    count_after=counts[1],
                    bytes_before=a.bytes if a else None,
                    bytes_after=b.bytes if b else None,
                    time=time,
                )
            )
        return tuple(changes)


def _what(group: NodeGroup, both: set[str]) -> dict[What, tuple[str, ...]]:
    if not group.nodes:
        counts = [Counter(unit.op for unit in side) for side in (group.before, group.after)]
        ops = sorted(op for op in counts[0].keys() | counts[1].keys() if counts[0][op] != counts[1][op])
        return {"inserted": tuple(ops)} if ops else {}
    sides = [{node: unit for unit in side for node in unit.source_nodes} for side in (group.before, group.after)]
    groups: dict[What, list[str]] = {}
    for node in group.nodes:
        if node in both:
            for what in _differ(sides[0][node], sides[1][node], both):
                groups.setdefault(what, []).append(node)
    return {what: tuple(nodes) for what, nodes in groups.items()}


def _differ(a: Unit, b: Unit, both: set[str]) -> list[What]:
    """Return what differs between the units that account for one node. A fact missing in one is no difference."""
    if (a.relation == "folded") != (b.relation == "folded"):
        return ["folding"]
    if a.relation == "folded":
        return []
    results: list[What] = []
    providers = a.provider != b.provider and None not in (a.provider, b.provider)
    if a.engine != b.engine or a.device != b.device or providers:
        results.append("placement")
    kernels = reported_kernel(a), reported_kernel(b)
    if None not in kernels and kernels[0] != kernels[1]:
        results.append("kernel")
    if a.precision_run != b.precision_run and None not in (a.precision_run, b.precision_run):
        results.append("precision")
    if a.layout != b.layout and None not in (a.layout, b.layout):
        results.append("layout")
    if both.intersection(a.source_nodes) != both.intersection(b.source_nodes) or (
        (a.relation == "opaque") != (b.relation == "opaque") and len(a.source_nodes) > 1
    ):
        results.append("grouping")
    return results


def _sums(units: Iterable[Unit]) -> dict[tuple[str, str], Time] | None:
    """Return the time of units together, by unit and kind; ``None`` where one ran that has no time."""
    sums: dict[tuple[str, str], Time] = {}
    for unit in units:
        time = unit.time
        if time is None:
            if unit.relation != "folded" and unit.status == "unobservable":
                return None
            continue
        key = (time.unit, time.kind)
        value = time.value + (sums[key].value if key in sums else 0.0)
        sums[key] = Time(value=value, unit=time.unit, kind=time.kind, runs=time.runs)
    return sums


def _spread(latency: Latency | None) -> tuple[float, float]:
    if latency is None or not latency.median_us:
        return 1.0, 1.0
    return latency.min_us / latency.median_us, latency.p90_us / latency.median_us


def _side(unit: Unit) -> UnitSide:
    return UnitSide(
        id=unit.id,
        op=unit.op,
        relation=unit.relation,
        source_nodes=unit.source_nodes,
        engine=unit.engine,
        device=unit.device,
        provider=unit.provider,
        kernel=reported_kernel(unit) or unit.kernel,
        precision=unit.precision_run,
        layout=unit.layout,
        time=unit.time,
    )


def _identity(report: Report, name: str) -> ReportSide:
    def stated(key: str) -> str:
        value = report.plan.get(key)
        return value if isinstance(value, str) else "?"

    return ReportSide(
        name=name,
        created=report.created,
        command=report.command,
        model=_of_model(report, "path") or "?",
        engine=stated("engine"),
        device=stated("device"),
        precision=stated("precision"),
        headline=report.headline,
        partial=report.partial,
    )


def _of_model(report: Report, key: str) -> str | None:
    model = report.plan.get("model")
    value = model.get(key) if isinstance(model, dict) else None
    return value if isinstance(value, str) and value else None


def _memory(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[MemoryChange, ...]:
    owners = dict.fromkeys((*before, *after))
    return tuple(
        MemoryChange(owner=owner, before=before.get(owner), after=after.get(owner))
        for owner in owners
        if before.get(owner) != after.get(owner)
    )


def _shapes(inputs: Any) -> str:
    items: Sequence[tuple[str, Any]] = list(inputs.items()) if isinstance(inputs, dict) else []
    return ", ".join(f"{name} {what}" for name, what in items[:4]) or "unknown"
