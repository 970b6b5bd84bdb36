# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compare_environments`: what differs between two environments for one model, from packages to time."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.argument_types import ARRAYS, CALLABLE, NUMBER, PATH, check_types
from xpuruntime.errors import InputError
from xpuruntime.evidence import Report, compare_reports
from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.tolerances import Tolerance, compare_within
from xpuruntime.files.paths import json_bytes
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.diff.locked import compare_with_lock
from xpuruntime.locks.diff.result import Diff, Level, environment_rows, plan_rows, possible_causes, restoring
from xpuruntime.locks.environments import MODULE, FileSide, LockSide, PythonSide, call, read_side, start_worker
from xpuruntime.locks.worker_side.xrt_session_worker import read_array, write_arrays
from xpuruntime.measuring.rounds import Progress, RoundTimes, in_worker, measure
from xpuruntime.measuring.statistics import Margin, RatioVerdict

if TYPE_CHECKING:
    from xpuruntime.evidence.report_comparison import ReportComparison, UnitSide, What
    from xpuruntime.runtime.worker import Worker

_PLACEMENT: tuple[What, ...] = ("placement", "grouping", "folding", "inserted")
_KERNELS: tuple[What, ...] = ("kernel", "precision", "layout")
#: Any difference of bits counts; the figures of the outputs are what is wanted of the comparison.
_BITWISE = Tolerance(rtol=0.0, atol=0.0, cosine=0.0)
_NAMED = 3


def compare_environments(
    before: str,
    after: str,
    model: str | os.PathLike[str] | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    budget: float = 60.0,
    margin: float = 0.05,
    confidence: float = 0.99,
    progress: Callable[[Progress], None] | None = None,
    **arguments: Any,
) -> Diff:
    """Say what differs between two environments for one model.

    Parameters
    ----------
    before, after : str
        Each a saved report, a lock, ``"here"`` for this interpreter, or ``"py:PATH"`` for another one, such as
        ``"py:old/bin/python"``. Beside a lock, an interpreter locks the model anew, under the same policy.
    model : str or path, optional
        What interpreters run; reports and locks are of their own.
    inputs : mapping of str to array, optional
        Default: generated from the model's shapes, or from those of a lock, the same each time.
    budget : float
        Seconds for timing.
    margin : float
        Share of the time that counts as a difference, and at least 2 microseconds.
    confidence : float
    progress : callable, optional
        Called as rounds go on.
    **arguments
        Of `InferenceSession`, for both sides: policy, device, engine, precision. JSON must carry them.

    Returns
    -------
    Diff
        Printable; ``.levels``, ``.exit_code``, ``.to_dict()``, ``.save()``.

    Raises
    ------
    InputError
        A side is no file and no interpreter, or a model is missing.
    LockError
        A lock is cut off, was edited, or is of a later release.
    EngineError
        An interpreter cannot run the model, or has ended while it did.
    """
    types = {
        "before": PATH, "after": PATH, "model": PATH, "inputs": ARRAYS, "budget": NUMBER, "margin": NUMBER,
        "confidence": NUMBER, "progress": CALLABLE,
    }  # fmt: skip
    check_types(types, locals(), optional=("model", "inputs", "progress"))
    sides = [read_side(os.fspath(side)) for side in (before, after)]
    running = [side for side in sides if isinstance(side, PythonSide)]
    if running and model is None:
        raise InputError(f"'{running[0].name}' is an environment that runs a model. Fix: give the model as MODEL")
    if not running and model is not None:
        raise InputError(
            f"'{sides[0].name}' and '{sides[1].name}' name their own model. Fix: leave '{os.fspath(model)}' out"
        )
    if any(isinstance(side, LockSide) for side in sides):
        return compare_with_lock(sides, model, inputs=inputs, arguments=arguments)
    with ScratchFolder("diff") as folder, contextlib.ExitStack() as stack:
        work = _Work(Path(folder), stack, model, inputs, arguments)
        opened = [work.open(side, index) for index, side in enumerate(sides) if not isinstance(side, LockSide)]
        comparison = compare_reports(opened[0].report, opened[1].report)
        comparison = msgspec.structs.replace(
            comparison,
            before=msgspec.structs.replace(comparison.before, name=before),
            after=msgspec.structs.replace(comparison.after, name=after),
        )
        environment = environment_rows(comparison)
        both = opened[0].worker is not None and opened[1].worker is not None
        numerics = _numerics(opened, comparison, environment) if both else _absent("the outputs")
        measured = _times(opened, budget, margin, confidence, progress) if both else None
        levels = (
            Level(name="environment", verdict="differs" if environment else "same", rows=environment),
            _level("plan", plan_rows(comparison, [side.defaults for side in opened], environment)),
            _placement(comparison, environment),
            _kernels(comparison, environment, opened),
            numerics,
            _absent("times that were measured at different times") if measured is None
            else _time(measured, comparison, environment),
        )  # fmt: skip
        return Diff(
            before=before,
            after=after,
            model=os.fspath(model) if model is not None else comparison.before.model,
            levels=levels,
            comparison=comparison,
            speed=measured.comparisons["after"] if measured else None,
            conditions=measured.conditions if measured else None,
            notes=(*comparison.notes, *(measured.conditions.remarks() if measured else ())),
        )


class _Opened:
    def __init__(
        self, name: str, report: Report, worker: Worker | None, folder: Path, defaults: dict[str, str]
    ) -> None:
        self.name, self.report, self.worker, self.folder, self.defaults = name, report, worker, folder, defaults

    def call(self, function: str, **arguments: Any) -> Any:
        assert self.worker is not None
        return call(self.worker, self.name, function, **arguments)


class _Work:
    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        model: str | os.PathLike[str] | None,
        inputs: Mapping[str, Any] | None,
        arguments: dict[str, Any],
    ) -> None:
        from xpuruntime.engines.precision import probe_feeds, probing
        from xpuruntime.engines.registry import read_model

        self.folder, self.stack, self.model, self.arguments = folder, stack, model, arguments
        self.inputs = folder / "inputs"
        self.running: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if model is not None:
            if inputs is None:
                info = read_model(model)
                inputs = feeds = probe_feeds(info)
                self.running = lambda: probing(info, feeds)
            write_arrays(self.inputs, inputs)

    def open(self, side: FileSide | PythonSide, index: int) -> _Opened:
        own = self.folder / f"side-{index}"
        own.mkdir()
        if isinstance(side, FileSide):
            return _Opened(side.name, side.report(), None, own, {})
        assert self.model is not None
        worker = self.stack.enter_context(start_worker(side, self.folder))
        model = os.path.abspath(self.model)  # noqa: PTH100  a link stays the name that was given
        call(worker, side.name, "open_session", model=model, arguments=self.arguments, inputs=str(self.inputs))
        with self.running():
            answer = call(worker, side.name, "explain")
        report = msgspec.json.decode(json_bytes(answer["report"]), type=Report)
        return _Opened(side.name, report, worker, own, answer["defaults"])


def _level(name: str, rows: tuple[Difference, ...], reason: str = "") -> Level:
    return Level(name=name, verdict="differs" if rows else "same", rows=rows, reason=reason)


def _absent(what: str) -> Level:
    name = "time" if "times" in what else "numerics"
    reason = f"{what} can be compared where both sides are interpreters"
    if name == "time":
        reason = f"{what} cannot be compared; give two interpreters"
    return Level(name=name, verdict="not compared", reason=reason)


def _placement(comparison: ReportComparison, environment: tuple[Difference, ...]) -> Level:
    rows = _groups(comparison, environment, _PLACEMENT)
    causes, restore = _caused(comparison, environment)
    rows += [
        Difference(
            subject=f"{boundary.kind} {boundary.where}",
            code="boundary",
            before=f"{boundary.count_before} a run",
            after=f"{boundary.count_after} a run",
            causes=causes,
            restore=restore,
        )
        for boundary in comparison.boundaries
        if boundary.count_before != boundary.count_after
    ]
    for nodes, before, after in (
        (comparison.only_before, "accounted for", "not accounted for"),
        (comparison.only_after, "not accounted for", "accounted for"),
    ):
        if nodes:
            rows.append(
                Difference(
                    subject="nodes",
                    code="nodes",
                    before=before,
                    after=after,
                    nodes=nodes,
                    causes=causes,
                    restore=restore,
                )
            )
    return _level("placement", tuple(rows))


def _kernels(comparison: ReportComparison, environment: tuple[Difference, ...], opened: list[_Opened]) -> Level:
    rows = _groups(comparison, environment, _KERNELS)
    causes, _ = _caused(comparison, environment)
    rows += [
        Difference(
            subject=f"{decision.op} {decision.description}".strip(),
            code="xpuruntime kernel",
            before=decision.kernel_before,
            after=decision.kernel_after,
            nodes=decision.nodes,
            causes=causes,
            restore=f"kernels.{decision.op}: {decision.kernel_before}",
        )
        for decision in comparison.decisions
    ]
    ran = [[unit for unit in side.report.units if unit.relation != "folded"] for side in opened]
    silent = max(sum(unit.kernel_source == "unknown" for unit in units) for units in ran)
    units = max(map(len, ran))
    reason = f"the engine does not report the kernels of {silent} of {units} units" if silent else ""
    if not rows and units and silent == units:
        said = f"{reason}; their precision and layout are the same"
        return Level(name="kernels", verdict="unobservable", reason=said)
    return _level("kernels", tuple(rows), reason)


def _groups(
    comparison: ReportComparison, environment: tuple[Difference, ...], kinds: tuple[What, ...]
) -> list[Difference]:
    causes, restore = _caused(comparison, environment)
    return [
        Difference(
            subject=", ".join(group.nodes[:_NAMED]) or "inserted",
            code=what,
            before=_units(group.before, what),
            after=_units(group.after, what),
            nodes=group.what[what],
            causes=causes,
            restore=restore,
        )
        for group in comparison.groups
        for what in kinds
        if what in group.what
    ]


def _units(units: tuple[UnitSide, ...], what: What) -> str:
    if what == "inserted":
        counts: dict[str, int] = {}
        for unit in units:
            counts[unit.op] = counts.get(unit.op, 0) + 1
        return ", ".join(f"{count} {op}" for op, count in sorted(counts.items())) or "none"
    return ", ".join(dict.fromkeys(_said_of(unit, what) for unit in units)) or "none"


def _said_of(unit: UnitSide, what: What) -> str:
    if what == "placement":
        return f"{unit.device} {unit.provider or unit.engine}"
    if what == "grouping":
        return f"{unit.op} of {len(unit.source_nodes)}"
    if what == "folding":
        return unit.relation
    return {"kernel": unit.kernel, "precision": unit.precision, "layout": unit.layout}[what] or "-"


def _caused(comparison: ReportComparison, environment: tuple[Difference, ...]) -> tuple[tuple[str, ...], str]:
    causes = possible_causes(environment, comparison.after.engine, comparison.after.device)
    return causes, restoring(causes, environment)


def _numerics(opened: list[_Opened], comparison: ReportComparison, environment: tuple[Difference, ...]) -> Level:
    before, after = (side.call("outputs", folder=str(side.folder)) for side in opened)
    causes, restore = _caused(comparison, environment)
    rows = []
    for name in dict.fromkeys((*before, *after)):
        array, other = before.get(name), after.get(name)
        if array is None or other is None:
            said = ["there" if side else "missing" for side in (array, other)]
            rows.append(
                Difference(subject=f"output {name}", before=said[0], after=said[1], causes=causes, restore=restore)
            )
        elif array["sha256"] != other["sha256"]:
            repeats = ["repeats" if side["repeats"] else "does not repeat" for side in (array, other)]
            drift, figures = _drift(array["file"], other["file"], name)
            rows.append(
                Difference(
                    subject=f"output {name}", code=drift, before=repeats[0], after=repeats[1], causes=causes,
                    restore=restore, figures=figures,
                )
            )  # fmt: skip
    if not before and not after:
        return Level(name="numerics", verdict="not compared", reason="no output is a plain array")
    if not rows:
        return Level(
            name="numerics", verdict="same", reason=f"the bits of {len(before)} output{'s' * (len(before) > 1)}"
        )
    first, reason = _first_node(
        [side.call("intermediates", folder=str(side.folder)) for side in opened], causes, restore
    )
    return _level("numerics", (*rows, *first), reason)


def _drift(before: str, after: str, name: str) -> tuple[str, dict[str, float]]:
    """Return how far an output is from another one as text, and as figures where both can be compared."""
    arrays = [{name: read_array(Path(path))[1]} for path in (before, after)]
    output = compare_within(arrays[0], arrays[1], _BITWISE).outputs[0]
    if arrays[0][name].shape != arrays[1][name].shape or arrays[0][name].dtype != arrays[1][name].dtype:
        return output.reason, {}
    figures = {"max_abs": output.max_abs, "max_rel": output.max_rel, "cosine": output.cosine}
    said = f"drift {output.max_abs:.3g}, {output.max_rel:.2g} of the largest, cosine "
    said += "undefined" if output.cosine is None else f"{output.cosine:.7f}"
    return said, {key: float(value) for key, value in figures.items() if value is not None and math.isfinite(value)}


def _first_node(traces: list[dict[str, Any]], causes: tuple[str, ...], restore: str) -> tuple[list[Difference], str]:
    """Return the first node whose output differs, with the outputs of all nodes as outputs of the model."""
    note = "; ".join(dict.fromkeys(trace["note"] for trace in traces if trace["note"]))
    for node, other in zip(traces[0]["nodes"], traces[1]["nodes"], strict=False):
        for tensor in node["tensors"].keys() & other["tensors"].keys():
            sides = [side["tensors"][tensor] for side in (node, other)]
            if sides[0]["sha256"] != sides[1]["sha256"]:
                figures, _ = _drift(sides[0]["file"], sides[1]["file"], tensor)
                row = Difference(
                    subject=f"first node {node['node']}", code=f"{node['op']}: {figures}", before=f"tensor {tensor}",
                    after="", nodes=(node["node"],), causes=causes, restore=restore,
                )  # fmt: skip
                return [row], note
    fused = (
        "with the outputs of all nodes as outputs of the model the bits are the same, so the difference comes from how "
        "nodes are fused or laid out"
    )
    return [], "; ".join(side for side in (fused, note) if side)


def _times(
    opened: list[_Opened], budget: float, margin: float, confidence: float, progress: Callable[[Progress], None] | None
) -> RoundTimes:
    variants = {
        name: in_worker(side.worker, f"{MODULE}:time_session")
        for name, side in zip(("before", "after"), opened, strict=True)
        if side.worker is not None
    }
    return measure(
        variants, control="before", margin=Margin(margin), confidence=confidence, budget=budget, progress=progress
    )


def _time(measured: RoundTimes, comparison: ReportComparison, environment: tuple[Difference, ...]) -> Level:
    ratio = measured.comparisons["after"]
    medians = {name: float(np.median(times)) * 1e6 for name, times in measured.rounds.items()}
    said = (
        f"{ratio.ratio:.3f} times as long [{ratio.low:.3f}, {ratio.high:.3f}] in {ratio.rounds} interleaved rounds "
        f"at a confidence of {ratio.confidence:.0%}, with a margin of {ratio.margin:.1%}: {ratio.verdict.value}"
    )
    if ratio.too_noisy and ratio.verdict is RatioVerdict.INCONCLUSIVE:
        said += "; the machine is too noisy, the first side differs from itself by more than half of the margin"
    if ratio.verdict is RatioVerdict.INCONCLUSIVE:
        return Level(name="time", verdict="undecided", reason=said)
    if ratio.verdict is RatioVerdict.TIED:
        return Level(name="time", verdict="same", reason=said)
    causes, restore = _caused(comparison, environment)
    row = Difference(
        subject="latency", code=ratio.verdict.value, before=f"{medians['before']:,.1f} us",
        after=f"{medians['after']:,.1f} us", causes=causes, restore=restore,
    )  # fmt: skip
    return Level(name="time", verdict="differs", reason=said, rows=(row,))
