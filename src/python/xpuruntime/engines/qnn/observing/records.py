# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumented runs of QNN, and the records that it writes: the trace, the graphs, and the profile of cycles."""

from __future__ import annotations

import json
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.base import Observed, Request
from xpuruntime.engines.observation import effective_of
from xpuruntime.engines.onnxruntime.observing.graph import computed_precision
from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, read_profile
from xpuruntime.engines.precision.types import read_and_written
from xpuruntime.engines.qnn.model import SessionWorker, WorkerFailed
from xpuruntime.engines.qnn.observing.units import INSERTED_CASTS, units_of
from xpuruntime.engines.qnn.opening import PROVIDER, Opening, Placed
from xpuruntime.errors import ModelError, XpuRuntimeError
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint
from xpuruntime.evidence.records import Boundary, Time, Unit
from xpuruntime.files.reading import decode_json
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.qnn.options import QnnSettings

_TRACE, _PROFILE, _ORT, _INPUT, _COMPILED = "qnn_op_trace.json", "profile.csv", "ort", "input", "compiled"
_NODE = re.compile(r"^[^,]*,NODE,(?P<value>\d+),(?P<unit>[^,]*),[^,]*,[^,]*,(?P<what>.*?) \(cycles\)")
_OPERATION = re.compile(r"^(?P<name>.*):OpId_\d+$")
_EDGE = re.compile(r"^(?P<name>Input|Output) OpId_\d+$")
#: Numbers of QNN's data types, and xpuruntime's names of them.
_TYPES = {
    0x0008: "int8", 0x0016: "int16", 0x0032: "int32", 0x0064: "int64",
    0x0108: "uint8", 0x0116: "uint16", 0x0132: "uint32", 0x0164: "uint64",
    0x0216: "fp16", 0x0226: "bf16", 0x0232: "fp32", 0x0264: "fp64",
    0x0304: "int4", 0x0308: "int8", 0x0316: "int16", 0x0332: "int32",
    0x0404: "uint4", 0x0408: "uint8", 0x0416: "uint16", 0x0432: "uint32",
    0x0508: "bool",
}  # fmt: skip
_STATIC = 4


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a compiled graph: QNN's operator, and the types of what it reads and writes."""

    name: str
    op: str
    read: str | None
    written: str | None

    @property
    def precision(self) -> str | None:
        """Such as ``"fp16"``, or ``"fp32->uint8"`` where these differ."""
        return read_and_written(self.read, self.written)


class OperationMapping(msgspec.Struct, frozen=True, kw_only=True):
    """One operation and the nodes that it stands for, as the trace says: names of the partitioned graph."""

    operation: str
    op: str
    nodes: tuple[str, ...]


class SessionTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All that was written about one session."""

    mappings: tuple[OperationMapping, ...] = ()
    nodes: tuple[dict[str, Any], ...] = ()
    operations: dict[str, Operation] = {}
    chip: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


def instrumented(opening: Opening, folder: Path, *, compiling: bool = False) -> Opening:
    """Return `opening` with what makes QNN write into `folder`; with `compiling`, no run is watched."""
    for name in (_INPUT, _COMPILED):
        (folder / name).mkdir()
    writing = {
        "enable_framework_op_trace": "1",
        "framework_op_trace_dir": str(folder),
        "dump_json_qnn_graph": "1",
        "json_qnn_graph_dir": str(folder / _COMPILED),
        "dump_qnn_ep_input_graph": "1",
        "dump_qnn_ep_input_graph_dir": str(folder / _INPUT),
    }
    if compiling:
        return msgspec.structs.replace(opening, options={**opening.options, **writing})
    # Each session of the provider in a process writes to this file: there is one in the process that is watched.
    writing |= {"profiling_level": "detailed", "profiling_file_path": str(folder / _PROFILE)}
    return msgspec.structs.replace(
        opening, options={**opening.options, **writing}, profile=None if opening.strict else str(folder / _ORT)
    )


def read_records(folder: Path) -> SessionTrace:
    """Read what QNN wrote about the graph. Never raises: what is missing or damaged is noted."""
    notes: list[str] = []
    trace = _json(folder / _TRACE, notes) or {}
    mappings = tuple(
        OperationMapping(
            operation=str(mapping.get("dst_name")),
            op=str(mapping.get("dst_qnn_op_type")),
            nodes=tuple(str(s.get("name")) for s in mapping.get("sources", ()) if s.get("type") == "OP"),
        )
        for part in trace.get("subgraph_traces") or ()
        for mapping in part.get("op_mappings") or ()
    )
    chip = None
    for entry in trace.get("soc_traces") or ():
        stated = entry.get("compilation_target", {})
        arch = re.sub(r"\D", "", str(stated.get("htp_arch", "")))
        chip = (int(stated.get("soc_model", 0)), int(arch or 0))
    operations: dict[str, Operation] = {}
    for path in sorted((folder / _COMPILED).glob("*.json")):
        if not path.name.endswith("_tensor_log.json"):
            operations.update(_operations((_json(path, notes) or {}).get("graph") or {}))
    return SessionTrace(
        mappings=mappings,
        nodes=_partitioned(folder / _INPUT, {name for mapping in mappings for name in mapping.nodes}, notes),
        operations=operations,
        chip=chip,
        notes=tuple(notes),
    )


def read_cycles(folder: Path) -> tuple[dict[str, list[int]], str | None]:
    """Return operation to its cycles, run by run, and what is wrong with the profile.

    ``Input`` and ``Output`` are what the graph's own inputs and outputs took.
    """
    path = folder / _PROFILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return {}, f"QNN wrote no profile ({error.strerror or error})"
    cycles: dict[str, list[int]] = {}
    for line in lines:
        match = _NODE.match(line)
        if match is None or match["unit"] != "CYCLES":
            continue
        named = _OPERATION.match(match["what"]) or _EDGE.match(match["what"])
        if named is not None:
            cycles.setdefault(named["name"], []).append(int(match["value"]))
    return cycles, None if cycles else "QNN's profile holds no operations"


def median_cycles(series: list[int], runs: int) -> tuple[float, int]:
    """Return the median of the counted runs and their number: the first run is cold and left out.

    An operation that several partitions have under one name counts with its sum.
    """
    parts = max(1, len(series) // (runs + 1)) if runs else 1
    sums = [sum(series[i : i + parts]) for i in range(0, len(series) - parts + 1, parts)]
    counted = sums[1:] or sums
    return float(statistics.median(counted)), len(counted)


def _json(path: Path, notes: list[str]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} of QNN is missing or damaged: {error}")
        return None


def _partitioned(folder: Path, wanted: set[str], notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Return the graph as it was partitioned: of the looks that QNN took at it, the last that has the traced nodes."""
    best: tuple[int, int, list[dict[str, Any]]] | None = None
    for path in folder.glob("*_qnn_ep_input_graph.json"):
        graph = (_json(path, notes) or {}).get("graph") or {}
        nodes = [
            {
                "name": name,
                "op": str(node.get("type")),
                "inputs": [str(k) for k in node.get("input_names", ())],
                "outputs": [str(k) for k in node.get("output_names", ())],
            }
            for name, node in (graph.get("nodes") or {}).items()
        ]
        number = re.search(r"\.(\d+)_qnn_ep_input_graph\.json$", path.name)
        rank = (len(wanted & {n["name"] for n in nodes}), int(number[1]) if number else 0)
        if best is None or rank > best[:2]:
            best = (*rank, nodes)
    if best is None:
        notes.append("QNN did not write the graph that it partitioned")
        return ()
    return tuple(best[2])


def _operations(graph: dict[str, Any]) -> dict[str, Operation]:
    tensors = graph.get("tensors") or {}
    operations = {}
    for name, node in (graph.get("nodes") or {}).items():
        read = [tensors[k] for k in node.get("input_names", ()) if k in tensors]
        varying = [entry for entry in read if entry.get("type") != _STATIC] or read
        written = [tensors[k] for k in node.get("output_names", ()) if k in tensors]
        operations[name] = Operation(
            name=name,
            op=str(node.get("type")),
            read=_word(varying[0]) if varying else None,
            written=_word(written[0]) if written else None,
        )
    return operations


def _word(tensor: dict[str, Any]) -> str | None:
    return _TYPES.get(int(tensor.get("data_type", -1)))


_UNITS = "units.json"


def write_units(folder: Path, units: Sequence[Unit]) -> None:
    """Write them into the folder of an artifact."""
    (folder / _UNITS).write_bytes(msgspec.json.encode(units))


def read_units(request: Request) -> tuple[Unit, ...] | None:
    """Return the units that were recorded when the artifact of `request` was compiled; ``None`` without an artifact."""
    if request.artifact is None:
        return None
    path = request.artifact.folder / _UNITS
    try:
        units: tuple[Unit, ...] = decode_json(path.read_bytes(), tuple[Unit, ...])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"the artifact's {path} cannot be read: {error}. Fix: compile the model again") from None
    return units


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
