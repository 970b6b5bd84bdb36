# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumented run of QNN: one session in a process of its own."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.base import Observed
from xpuruntime.engines.observation import effective_of
from xpuruntime.engines.onnxruntime.observing.graph import computed_precision
from xpuruntime.engines.onnxruntime.observing.profile import read_profile
from xpuruntime.engines.qnn.model import SessionWorker, WorkerFailed
from xpuruntime.engines.qnn.observing.records import instrumented, median_cycles, read_cycles, read_records, read_units
from xpuruntime.engines.qnn.observing.units import INSERTED_CASTS, units_of
from xpuruntime.engines.qnn.opening import PROVIDER, Placed
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint
from xpuruntime.evidence.records import Boundary, Time, Unit
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent
    from xpuruntime.engines.qnn.opening import Opening
    from xpuruntime.engines.qnn.options import QnnSettings

_BITS = 24
_NAMES = {23: "fp32", 10: "fp16", 7: "bf16"}


def observe(
    request: Request, settings: QnnSettings, source: ModelSource, opening: Opening, feeds: Mapping[str, Any], runs: int
) -> Observed:
    """Run an instrumented session and say what ran. Never raises for what goes wrong on the way: it is noted."""
    notes: list[str] = []
    compiled = read_units(request)
    try:
        room = ScratchFolder("qnn")
    except OSError as error:
        note = (
            f"nothing was observed: no temporary folder for QNN's records ({error}). Set TMPDIR to one with free space"
        )
        return Observed(partial=True, notes=(note,))
    with room as directory:
        folder = Path(directory)
        try:
            placed, kept = _run(source, instrumented(opening, folder), feeds, max(1, runs))
        except (WorkerFailed, XpuRuntimeError) as error:
            return Observed(partial=True, notes=(f"nothing was observed: {error_line(error)[:500]}",))
        cycles, problem = read_cycles(folder)
        recorded = read_records(folder) if compiled is None else None
        host = _host_events(folder, notes)
    partial = problem is not None
    if problem is not None:
        notes.append(problem)
    if compiled is not None:
        units: tuple[Unit, ...] = compiled
        notes.append("which nodes an operation stands for is as it was recorded when the model was compiled")
    else:
        assert recorded is not None
        units, said, missing = units_of(request, source, recorded, placed)
        notes.extend(said)
        partial |= missing
    kind: Any = "simulated" if settings.simulated else "cycles"
    if request.policy.execution.precision == "fp32":
        units = tuple(_as_computed(unit, kept) for unit in units)
    units = tuple(_seen_in_profile(unit, cycles, request.device) for unit in units)
    timed = tuple(_timed(unit, cycles, host, max(1, runs), kind) for unit in units)
    timed += tuple(
        _edge(name, cycles[name], request.device, max(1, runs), kind) for name in ("Input", "Output") if name in cycles
    )
    if settings.simulated:
        notes.append(
            f"the HTP simulator ran on {platform.machine()}: its cycles are simulated and say nothing about a device"
        )
    notes.append("QNN names no kernels: only its operators, and their cycles, are reported")
    notes.append(_arithmetic(kept))
    effective = _effective(timed, recorded.chip if recorded is not None else None)
    return Observed(
        units=timed, boundaries=_boundaries(timed), effective=effective, notes=tuple(notes), partial=partial
    )


def _run(source: ModelSource, opening: Opening, feeds: Mapping[str, Any], runs: int) -> tuple[list[Placed], int | None]:
    """Run once cold and `runs` times counted; return where the nodes went, and how many bits its arithmetic keeps."""
    worker = SessionWorker()
    try:
        number, reply = worker.open(source.model, opening)
        checkpoint(LOADED)
        for run in range(runs + 1):
            worker.run(number, feeds)
            if run in (0, runs):
                checkpoint(COUNTED if run else COLD)
        worker.drop(number)  # QNN writes the rest of its profile when the session ends
        kept = _bits_kept(worker, opening)
    finally:
        worker.close()
    return [msgspec.convert(node, Placed) for node in reply["placed"]], kept


def _bits_kept(worker: SessionWorker, opening: Opening) -> int | None:
    """Multiply 1 + 2^-k by one on the same chip, as fp32 tensors, and return how many bits come through."""
    from onnx import TensorProto, helper, numpy_helper

    x = (1 + 2.0 ** -np.arange(1, _BITS)).astype(np.float32)[None]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "bits",
        [value("x", TensorProto.FLOAT, list(x.shape))],
        [value("y", TensorProto.FLOAT, list(x.shape))],
        [numpy_helper.from_array(np.eye(_BITS - 1, dtype=np.float32), "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    watching = ("profiling_level", "profiling_file_path", "framework_op_trace_dir", "enable_framework_op_trace")
    dumping = ("dump_json_qnn_graph", "json_qnn_graph_dir", "dump_qnn_ep_input_graph", "dump_qnn_ep_input_graph_dir")
    plain = {key: text for key, text in opening.options.items() if key not in (*watching, *dumping)}
    try:
        number, _ = worker.open(
            proto.SerializeToString(), msgspec.structs.replace(opening, options=plain, profile=None, folder=None)
        )
        y = worker.run(number, {"x": x})["y"]
    except (WorkerFailed, XpuRuntimeError):
        return None
    near = np.abs(y - x)[0] < 2.0 ** -(np.arange(1, _BITS) + 1)
    return int(np.argmin(near)) if not near.all() else _BITS - 1


def _nearest(kept: int) -> str:
    return _NAMES[min(_NAMES, key=lambda bits: abs(bits - kept))]


def _arithmetic(kept: int | None) -> str:
    if kept is None:
        return "in which precision this chip multiplies fp32 tensors could not be probed"
    return f"a probe on this chip: products of fp32 tensors keep {kept} bits after the point, which is {_nearest(kept)}"


def _as_computed(unit: Unit, kept: int | None) -> Unit:
    """Return a unit that was asked for fp32 with the arithmetic that the probe found, where that differs."""
    if unit.precision_requested != "fp32" or unit.precision_run != "fp32" or kept is None:
        return unit
    nearest = _nearest(kept)
    return unit if nearest == "fp32" else msgspec.structs.replace(unit, precision_run=nearest, status="substituted")


def _seen_in_profile(unit: Unit, cycles: Mapping[str, list[int]], device: str) -> Unit:
    if unit.relation != "folded" or unit.status != "unobservable" or unit.id not in cycles:
        return unit
    why = "the profile has an operation of this name; the records of the graph are missing"
    return msgspec.structs.replace(
        unit, relation="exact", device=device, provider=PROVIDER, placement_reason=why, placement_source="log"
    )


def _timed(unit: Unit, cycles: Mapping[str, list[int]], host: Mapping[str, NodeEvent], runs: int, kind: Any) -> Unit:
    if unit.device == "cpu":
        event = host.get(unit.id)
        if event is None:
            return msgspec.structs.replace(unit, status="unobservable")
        time = Time(value=event.time_us, unit="us", kind="wall", runs=event.runs)
        return msgspec.structs.replace(unit, time=time, precision_run=computed_precision(event))
    series = cycles.get(unit.id)
    if not series:
        return unit
    value, counted = median_cycles(series, runs)
    return msgspec.structs.replace(unit, time=Time(value=value, unit="cycles", kind=kind, runs=counted))


def _edge(name: str, series: list[int], device: str, runs: int, kind: Any) -> Unit:
    value, counted = median_cycles(series, runs)
    return Unit(
        id=name,
        op=name,
        relation="inserted",
        source_nodes=(),
        outputs=(),
        engine="qnn",
        device=device,
        provider=PROVIDER,
        time=Time(value=value, unit="cycles", kind=kind, runs=counted),
        placement_reason="the graph's own inputs or outputs",
        placement_source="log",
    )


def _host_events(folder: Path, notes: list[str]) -> dict[str, NodeEvent]:
    events: dict[str, NodeEvent] = {}
    for path in folder.glob("ort*.json"):
        try:
            events.update({e.name: e for e in read_profile(path).events if e.provider == "CPUExecutionProvider"})
        except XpuRuntimeError as error:
            notes.append(str(error))
    return events


def _boundaries(units: Sequence[Unit]) -> tuple[Boundary, ...]:
    groups: dict[tuple[Any, str], list[Unit]] = {}
    for unit in units:
        if unit.time is None:
            continue
        if unit.op in ("Input", "Output") and unit.relation == "inserted":
            groups.setdefault(("copy", "cpu -> npu" if unit.op == "Input" else "npu -> cpu"), []).append(unit)
        elif unit.relation == "inserted" and unit.op == "Transpose":
            groups.setdefault(("layout", "Transpose on npu"), []).append(unit)
        elif unit.relation == "inserted" and unit.op in INSERTED_CASTS:
            groups.setdefault(("cast", f"{unit.precision_run or '?'} on npu"), []).append(unit)
        elif unit.device == "cpu":
            groups.setdefault(("cpu_island", f"{unit.id} ({unit.op})"), []).append(unit)
    return tuple(
        Boundary(kind=kind, where=where, count=len(held), time=_sum(held)) for (kind, where), held in groups.items()
    )


def _sum(units: Sequence[Unit]) -> Time | None:
    times = [unit.time for unit in units if unit.time is not None]
    return msgspec.structs.replace(times[0], value=sum(t.value for t in times)) if times else None


def _effective(units: Sequence[Unit], chip: tuple[int, int] | None) -> dict[str, str]:
    effective = effective_of(units, "qnn")
    if chip is not None:
        where = "execution.provider_options.qnn"
        stated = f"soc_model={chip[0]}, htp_arch={chip[1]}"
        effective.update({f"{where}.{key}": stated for key in ("soc", "soc_model", "htp_arch")})
    return effective
