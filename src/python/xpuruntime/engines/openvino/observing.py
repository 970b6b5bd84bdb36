# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observation of OpenVINO: an instrumented copy, its executed graph, and what that shows of the source nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from xpuruntime.engines.base import Observed, Request
from xpuruntime.engines.observation import CONVERSIONS, UnitIds, folded_unit, listed
from xpuruntime.engines.openvino.counters import Counted, Shares, count, idle_call_us, requested_precision, share_out
from xpuruntime.engines.openvino.execution_graph import Executed, name_without_numbers, read_graph
from xpuruntime.engines.openvino.options import OpenVinoSettings, effective
from xpuruntime.engines.precision.types import FLOATS, meets, model_precisions, precision_name, precision_of
from xpuruntime.engines.quantization.style import HEAVY
from xpuruntime.evidence.memory_over_time import LiveBytes, UnitMemory, live_bytes
from xpuruntime.evidence.records import Boundary, Time, Unit

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

_IDLE = "nothing was done in the runs: a view of its input, or a constant prepared when the model was compiled"
_ONCE = "it ran in the first run alone: a constant prepared then, and kept"
_TIMES = (
    "times of units are means, as OpenVINO counts them: of each run it cuts off what is less than a microsecond. The "
    "first, cold run is left out"
)
_EIGHT_BITS = frozenset({"int8", "uint8"})
_INTEGER = frozenset({"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"})


def observe(
    compiled: Any,
    feeds: Mapping[str, Any],
    runs: int,
    info: ModelInfo,
    *,
    request: Request,
    settings: OpenVinoSettings,
    idle: Callable[[], Any],
    compiled_model: Any,
) -> Observed:
    """Run a compiled model with counters once cold and `runs` times, and say what ran."""
    device = request.device
    notes: list[str] = []
    counted = count(compiled, feeds, max(1, runs), info, notes)
    outside = {} if counted.broken else _outside(idle, notes)
    try:
        executed = read_graph(compiled)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        return Observed(partial=True, notes=(*notes, f"OpenVINO gives no executed graph here: {text}"))
    names = [tensor.name for tensor in info.inputs]
    shares = share_out(info.nodes, executed, names, [tensor.name for tensor in info.outputs])
    joiner = _Units(executed, shares, info, device, settings, counted)
    units = joiner.all()
    run_us, units_us = joiner.sums()
    notes += joiner.notes
    ran = [node for node in executed if not node.still]
    return Observed(
        units=tuple(units),
        boundaries=_boundaries(executed, joiner),
        effective={**effective(compiled_model, settings, device, request.policy.execution.shapes), **_overall(units)},
        notes=tuple(notes),
        partial=counted.broken,
        run_us=run_us,
        units_us=units_us,
        outside_us=outside,
        cut_us=joiner.cut_us,
        live=_live(executed, [(node, unit.id) for node, unit in zip(ran, units, strict=False)]),
    )


def units_of(
    executed: Sequence[Executed], info: ModelInfo, device: str, settings: OpenVinoSettings
) -> tuple[tuple[Unit, ...], list[str]]:
    """Return the units of an executed graph without times, and notes."""
    names = [tensor.name for tensor in info.inputs]
    shares = share_out(info.nodes, executed, names, [tensor.name for tensor in info.outputs])
    joiner = _Units(executed, shares, info, device, settings, Counted())
    units = tuple(joiner.all())
    return units, [note for note in joiner.notes if note != _TIMES]


def _live(executed: Sequence[Executed], ran: Sequence[tuple[Executed, str]]) -> tuple[LiveBytes, ...]:
    """Return what is live around each executed node; nothing where a shape is open, so that its size is not known."""
    steps = []
    for node, unit in ran:
        if node.time_us is None and node.kernel is None and node.above:
            steps.append(UnitMemory(unit=unit, reads=node.above, views={node.name: node.above[0]}))
        elif node.output_bytes is None:
            return ()
        else:
            steps.append(UnitMemory(unit=unit, reads=node.above, makes={node.name: node.output_bytes}))
    outputs = {name for node in executed if node.kind in ("Output", "Result") for name in node.above}
    return live_bytes(steps, outputs)


def _outside(idle: Callable[[], Any], notes: list[str]) -> dict[str, float]:
    try:
        return {"call": idle_call_us(idle())}
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        notes.append(f"what a request itself costs is not known, a graph without operators does not run here: {text}")
        return {}


class _Units:
    def __init__(
        self,
        executed: Sequence[Executed],
        shares: Shares,
        info: ModelInfo,
        device: str,
        settings: OpenVinoSettings,
        counted: Counted,
    ) -> None:
        self.executed, self.shares, self.info = executed, shares, info
        self.device, self.settings, self.counted = device, settings, counted
        self.runs = len(counted.spent)
        #: How much more the units may have taken of a run than their times tell.
        self.cut_us = 0.0
        self.types = model_precisions(info.named_proto()) if _has_source(info) else {}
        self.read = self.types | _types_of_sources(info) if self.types else {}
        self.makers = {name: node.op for node in info.nodes for name in node.outputs if name}
        self.notes: list[str] = []
        self._ids = UnitIds()

    def all(self) -> list[Unit]:
        """Return the units in the order they ran, then those that do not run."""
        units = [self._unit(i, node) for i, node in enumerate(self.executed) if not node.still]
        units += [self._folded(index, why) for index, why in sorted(self.shares.folded.items())]
        if self.shares.inferred:
            first = self.info.nodes[min(self.shares.inferred)].name
            self.notes.append(
                f"{len(self.shares.inferred)} node(s), such as {first!r}, are not mentioned in OpenVINO's executed "
                "graph; they were attributed to the unit that reads their results"
            )
        apart = [u for u in self.executed if not u.still and u.kernel and not _alike(u.node_precision, u.precision)]
        if apart:
            executed = apart[0]
            self.notes.append(
                f"OpenVINO says two precisions of {len(apart)} unit(s), such as "
                f"{name_without_numbers(executed.name)!r}: {executed.node_precision}, "
                f"and the kernel {executed.kernel}; the kernel's is reported"
            )
        self._cut()
        if not self.types:
            self.notes.append("the source model is not here, so the types it states are not known")
        return units

    def _cut(self) -> None:
        """Sum up what whole microseconds hide, and say what has no time for that reason."""
        self.notes.append(_TIMES)
        counted = [(node, self.counted.counts[node.name]) for node in self.executed if self._counts(node)]
        self.cut_us = float(sum(count.high - count.low + 1 for _, count in counted))
        short = [node.name for node, _ in counted if self.time(node) is None]
        if short:
            self.notes.append(
                f"{len(short)} unit(s), such as {name_without_numbers(short[0])!r}, have no time: they took less than "
                "a microsecond, which OpenVINO rounds to nothing"
            )

    def _counts(self, executed: Executed) -> bool:
        """Whether a node is one that works in every run, as far as the executed graph shows."""
        return not executed.still and bool(executed.time_us or executed.kernel) and executed.name in self.counted.counts

    def _once(self, executed: Executed) -> bool:
        """Whether a node ran in the first run alone: OpenVINO does not count it among those of a request."""
        return executed.time_us is not None and bool(self.counted.counts) and executed.name not in self.counted.counts

    def inserted(self, position: int) -> bool:
        return not self.shares.owned.get(position) and not self.shares.serves.get(position)

    def time(self, executed: Executed) -> Time | None:
        if not self._counts(executed) or executed.name not in self.counted.seen:
            return None
        return Time(value=self.counted.counts[executed.name].low, unit="us", kind="wall", runs=self.runs)

    def sums(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return wall times of runs, and what all units took of each, or, where that is too coarse, of a mean one."""
        if not self.runs or self.counted.broken:
            return (), ()
        timed = [node.name for node in self.executed if not node.still and self.time(node) is not None]
        each = self.counted.sums_of_runs(timed)
        if each:
            return tuple(self.counted.spent), each
        kept = self.counted.kept(timed)
        if len(kept) < self.runs:
            self.notes.append(
                f"{self.runs - len(kept)} of {self.runs} instrumented runs are not in the time of a run: for most of "
                "their time the machine did something else, outside of every unit"
            )
        return tuple(kept), (sum(self.counted.counts[name].low for name in timed),)

    def _unit(self, position: int, executed: Executed) -> Unit:
        nodes = self.info.nodes
        owned = self.shares.owned.get(position, [])
        served = self.shares.serves.get(position, [])
        inside = any(nodes[i].graph for i in owned)
        relation: Literal["exact", "fused", "inserted", "opaque"] = (
            "opaque" if inside else "inserted" if not owned else "exact" if len(owned) == 1 else "fused"
        )
        # a view, or a constant that was prepared when compiling
        idle = executed.time_us is None and executed.kernel is None
        wanted = None if idle else self._wanted(owned, executed.precision)
        if wanted is None and not owned and not idle:  # a step of a node; one that quantizes is in two
            # of sizes or indices
            counts = executed.precision not in FLOATS | _EIGHT_BITS and executed.writes not in FLOATS
            counts = counts or self._integer(served) or self._eight_bits(served, executed.precision)
            wanted = None if counts else self._wanted(served, executed.precision)
            wanted = None if wanted == "int8" else wanted
        # OpenVINO does not say what ran inside of a subgraph, and its own type is that of its condition.
        ran = None if inside and self._integer(owned) else self._ran(executed, owned, wanted)
        deviates = bool(wanted and ran and owned and not meets(wanted, ran))
        return Unit(
            id=self._id(executed.name),
            op=executed.kind,
            relation=relation,
            source_nodes=tuple(nodes[i].name for i in owned),
            outputs=tuple(n for n in (nodes[owned[-1]].outputs if owned else ()) if n),
            serves=tuple(nodes[i].name for i in served),
            engine="openvino",
            device=self.device,
            provider=self.settings.device,
            kernel=executed.kernel,
            kernel_source="reported" if executed.kernel else "unknown",
            precision_requested=wanted,
            precision_run=ran,
            layout=executed.layout,
            time=self.time(executed),
            placement_reason=_IDLE if idle else _ONCE if self._once(executed) else None,
            placement_source="rule" if idle or self._once(executed) else "none",
            status="substituted" if deviates else "honoured",
        )

    def _folded(self, index: int, why: str) -> Unit:
        node = self.info.nodes[index]
        where = {"device": self.device, "provider": self.settings.device}
        return folded_unit(node, "openvino", why, id=self._id(node.name), **where)

    def _ran(self, executed: Executed, owned: Sequence[int], wanted: str | None) -> str | None:
        """Return the precision in which a unit ran."""
        # OpenVINO's is that of the first input. A condition or a counter there, as the model has it, says nothing of
        # floats that are asked for: then what the unit writes does.
        quantized = self._integer(owned) or self._eight_bits(owned, executed.precision)
        if quantized or wanted not in FLOATS or executed.precision in FLOATS or executed.writes is None:
            return executed.precision
        if executed.kind == "Subgraph" and executed.node_precision in FLOATS and executed.writes in FLOATS:
            return executed.node_precision  # the kernel is named after a mask, such as the constant one of a Trilu
        first = (node.inputs[0] if node.inputs else "" for node in (self.info.nodes[i] for i in owned))
        return executed.writes if any(self.read.get(name, "") not in FLOATS for name in first) else executed.precision

    def _wanted(self, owned: Sequence[int], ran: str | None) -> str | None:
        """Return the precision asked for of a unit; ``None`` where it makes no floats, or none was asked of it."""
        stated = requested_precision(self.info.nodes, owned, self.types)
        if all(self.info.nodes[i].op in CONVERSIONS for i in owned):
            return None
        heavy = [i for i in owned if self.info.nodes[i].op in HEAVY]
        integer = self._integer(owned)
        if self.settings.precision in FLOATS and (integer or self._eight_bits(owned, ran)):
            return self.settings.precision  # whatever the model states
        if integer:
            return "int8"
        if self.settings.precision == "int8" and heavy and self.info.quantization.scheme == "weight_only":
            return "int8"  # its activations stay in floats, and so does its arithmetic
        if self.settings.precision == "int8":
            return "int8" if heavy and self.settings.quantize and self._weighted(heavy[0]) else None
        if self._eight_bits(owned, ran):
            return "int8"  # beside a product that is: whether 8 bits go on is the engine's choice
        if stated is None or self.settings.precision == "model":
            return stated
        return self.settings.precision

    def _integer(self, owned: Sequence[int]) -> bool:
        ops = ((i, self.info.nodes[i].op) for i in owned)
        return any(op in _INTEGER or (op in HEAVY and self._quantized(i)) for i, op in ops)

    def _eight_bits(self, owned: Sequence[int], ran: str | None) -> bool:
        return ran in _EIGHT_BITS and any(self._quantized(i) for i in owned)

    def _quantized(self, index: int) -> bool:
        return any(self.makers.get(name) == "DequantizeLinear" for name in self.info.nodes[index].inputs[:1])

    def _weighted(self, index: int) -> bool:
        inputs = self.info.nodes[index].inputs
        return len(inputs) > 1 and inputs[1] not in self.makers

    def _id(self, name: str) -> str:
        return self._ids(name_without_numbers(name))


def _types_of_sources(info: ModelInfo) -> dict[str, str]:
    types = {input_.name: precision_name(input_.dtype) for input_ in info.inputs}
    for tensor in info.named_proto().graph.initializer:
        types[tensor.name] = precision_of(tensor.data_type)
    return types


def _alike(node: str | None, kernel: str | None) -> bool:
    """Whether two precisions are one: kernels of 8 bits do not say whether there is a sign."""
    return node == kernel or {node, kernel} <= _EIGHT_BITS


def _has_source(info: ModelInfo) -> bool:
    """Whether the model file is still there as it was: an artifact runs without it."""
    from xpuruntime.errors import ModelError

    try:
        info.named_proto()
    except ModelError:
        return False
    return True


def _boundaries(executed: Sequence[Executed], units: _Units) -> tuple[Boundary, ...]:
    groups: dict[tuple[Literal["cast", "layout"], str], list[Executed]] = {}
    for position, node in enumerate(executed):
        if node.still or node.kind not in ("Reorder", "Convert") or not units.inserted(position):
            continue
        if node.reads != node.writes and node.reads and node.writes:
            groups.setdefault(("cast", f"{node.reads} -> {node.writes} on {units.device}"), []).append(node)
        else:
            groups.setdefault(("layout", f"{node.kind} on {units.device}"), []).append(node)
    boundaries = []
    for (kind, where), members in sorted(groups.items()):
        times = [t for member in members if (t := units.time(member)) is not None]
        sizes = [member.size for member in members]
        boundaries.append(
            Boundary(
                kind=kind,
                where=where,
                count=len(members),
                bytes=None if any(size is None for size in sizes) else sum(size or 0 for size in sizes),
                time=Time(value=sum(t.value for t in times), unit="us", kind="wall", runs=units.runs)
                if times
                else None,
            )
        )
    return tuple(boundaries)


def _overall(units: Sequence[Unit]) -> dict[str, str]:
    overall = {}
    ran = [u for u in units if u.source_nodes and u.relation != "folded"]
    for key, values in (
        ("execution.precision", [u.precision_run for u in ran if u.precision_requested and u.precision_run]),
        ("execution.layout", [u.layout for u in ran if u.layout]),
    ):
        if values:
            overall[key] = listed(values)
    return overall
