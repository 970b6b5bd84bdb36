# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records that QNN writes about a graph and its runs: the trace, the graphs, and the profile of cycles."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.precision.names import read_and_written
from xpuruntime.errors import ModelError
from xpuruntime.evidence.records import Unit
from xpuruntime.files.reading import decode_json

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.qnn.opening import Opening

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
