# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Facts of units: borders, live memory, requested precision, and the kernel decisions for their nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.engines.observation import CONVERSIONS, is_product
from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView, provider_device
from xpuruntime.engines.onnxruntime.observing.node_matching import COPIES
from xpuruntime.engines.onnxruntime.precision_controls import OPERATORS, quantizes_activations
from xpuruntime.engines.precision.types import FLOATS, model_precisions, precision_name
from xpuruntime.evidence.kernel_records import DecisionSource, KernelCandidate, KernelDecision, merged
from xpuruntime.evidence.memory_over_time import LiveBytes, UnitMemory, live_bytes
from xpuruntime.evidence.records import Boundary, Time

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting
    from xpuruntime.engines.onnxruntime.rewriting.loading import Timed
    from xpuruntime.engines.onnxruntime.rewriting.rules import Rewrite, UnrewrittenNode
    from xpuruntime.ops.decision_log import Decision

_LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})
_CPU = "CPUExecutionProvider"


def boundaries_of(
    graph: GraphView, seen: dict[int, NodeEvent], inserted: Collection[int], device: str
) -> tuple[Boundary, ...]:
    """Return the boundaries of one run, longest first within a kind."""
    groups: dict[tuple[Literal["copy", "cast", "layout"], str], list[NodeEvent]] = {}
    for node in graph.nodes:
        event = seen.get(node.position)
        if event is None:
            continue
        if node.op in COPIES:
            ends = ("cpu", device) if node.op == "MemcpyFromHost" else (device, "cpu")
            groups.setdefault(("copy", f"{ends[0]} -> {ends[1]}"), []).append(event)
        elif node.op == "Cast" and node.position in inserted:
            read = precision_name(event.inputs[0].dtype) if event.inputs else "?"
            written = precision_name(event.outputs[0].dtype) if event.outputs else "?"
            ran_on = provider_device(event.provider, device)
            groups.setdefault(("cast", f"{read} -> {written} on {ran_on}"), []).append(event)
        elif node.op in _LAYOUT and (node.position in inserted or node.domain == "com.microsoft.nchwc"):
            groups.setdefault(("layout", f"{node.op} on {provider_device(event.provider, device)}"), []).append(event)
    boundaries = [_boundary(kind, where, events) for (kind, where), events in groups.items()]
    boundaries += _islands(graph, seen)
    order = ("copy", "cast", "layout", "cpu_island", "sync")
    return tuple(sorted(boundaries, key=lambda b: (order.index(b.kind), -(b.time.value if b.time else 0.0), b.where)))


def _boundary(kind: Literal["copy", "cast", "layout"], where: str, events: list[NodeEvent]) -> Boundary:
    return Boundary(
        kind=kind,
        where=where,
        count=sum(e.calls for e in events),
        bytes=sum(e.output_bytes * e.calls for e in events),
        time=_sum(events),
    )


def _sum(events: Iterable[NodeEvent]) -> Time | None:
    events = list(events)
    if not events:
        return None
    times = [event.time for event in events]
    return Time(value=sum(time_.value for time_ in times), unit="us", kind=times[0].kind, runs=times[0].runs)


def _islands(graph: GraphView, seen: dict[int, NodeEvent]) -> list[Boundary]:
    """Return the connected groups of CPU nodes in a session that also runs elsewhere."""
    if {e.provider for e in seen.values()} <= {_CPU}:
        return []
    cpu = {n.position: n for n in graph.nodes if n.position in seen and seen[n.position].provider == _CPU}
    islands: list[Boundary] = []
    done: set[int] = set()
    for start in cpu:
        if start in done:
            continue
        done.add(start)
        group, bytes_copied, copies = [cpu[start]], 0, set()
        for node in group:
            for other in _neighbours(graph, node):
                if other.op in COPIES and other.position in seen and other.position not in copies:
                    copies.add(other.position)
                    bytes_copied += seen[other.position].output_bytes * seen[other.position].calls
                elif other.position in cpu and other.position not in done:
                    done.add(other.position)
                    group.append(other)
        group.sort(key=lambda n: n.position)
        ops = ", ".join(dict.fromkeys(n.op for n in group))
        span = group[0].name if len(group) == 1 else f"{group[0].name} .. {group[-1].name}"
        islands.append(
            Boundary(
                kind="cpu_island",
                where=f"{span} ({ops})",
                count=len(group),
                bytes=bytes_copied if copies else None,
                time=_sum(seen[n.position] for n in group),
            )
        )
    return islands


def _neighbours(graph: GraphView, node: NodeView) -> list[NodeView]:
    above = [graph.producers[k] for k in node.inputs if k in graph.producers]
    return above + [n for k in node.outputs for n in graph.consumers.get(k, ())]


#: Bits of an element, by ONNX Runtime's names of types.
_BITS = {
    "float": 32, "float32": 32, "double": 64, "float64": 64, "float16": 16, "bfloat16": 16, "int8": 8, "uint8": 8,
    "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64, "bool": 8, "int4": 4, "uint4": 4,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "complex64": 64, "complex128": 128,
}  # fmt: skip
#: Operators that ONNX Runtime runs in the memory of their first input.
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})


def live_of(graph: GraphView, seen: Mapping[int, NodeEvent], ids: Mapping[int, str]) -> tuple[LiveBytes, ...]:
    """Return what is live around each node of the main graph that ran; nodes inside of control flow are its own."""
    ran = [node for node in graph.nodes if node.position in seen and not node.scope]
    ran.sort(key=lambda node: seen[node.position].order)
    return live_bytes([_step(node, seen[node.position], ids[node.position]) for node in ran], graph.outputs)


def _step(node: NodeView, event: NodeEvent, unit: str) -> UnitMemory:
    outputs = [name for name in node.outputs if name]
    reads = tuple(name for name in node.inputs if name)
    sizes = [_bytes(output.dtype, output.elements) for output in event.outputs]
    if node.op in _VIEWS and not node.domain and reads and outputs:
        rest = dict(zip(outputs[1:], sizes[1:], strict=False))
        return UnitMemory(unit=unit, reads=reads, makes=rest, views={outputs[0]: reads[0]})
    if len(sizes) != len(outputs):  # what is left out cannot be distinguished: all of it counts as the first
        sizes = [event.output_bytes] + [0] * (len(outputs) - 1)
    return UnitMemory(unit=unit, reads=reads, makes=dict(zip(outputs, sizes, strict=False)))


def _bytes(dtype: str, elements: int) -> int:
    return (elements * _BITS.get(dtype, 0) + 7) // 8


#: Types in which no number of a model is computed.
_INDICES = frozenset(("int64", "int32", "bool"))
#: Types that activations are quantized to.
_QUANTIZED = frozenset(("int8", "uint8", "int16", "uint16"))


class RequestedPrecision:
    """The precision that is asked for of each unit of one session."""

    def __init__(self, model: Any, source: GraphView, constant: AbstractSet[str], precision: str) -> None:
        self._source, self._constant, self._precision = source, constant, precision
        self._types = model_precisions(model, source.dtypes)

    def of_executed(
        self, op: str, owned: Sequence[int], serves: Sequence[int], outputs: Sequence[str], ran: str | None
    ) -> str | None:
        """Return what was asked for of an executed node; ``None`` where no number is computed."""
        if not owned and ran is not None and ran.rpartition("->")[2] in _INDICES:  # sizes in an expansion
            return None
        if self._only_indices(outputs, ran):
            return None
        return self.of(op, owned, ran) or self.of(op, serves, ran)

    def of(self, op: str, nodes: Sequence[int], ran: str | None) -> str | None:
        """Return what is asked for of source nodes that run as `op`; ``None`` where no precision applies to them."""
        held = [self._source.nodes[i] for i in nodes]
        if not held or {op, *(n.op for n in held)} <= CONVERSIONS:
            return None
        if op in OPERATORS:
            return self._of_quantized(held, ran)
        if self._precision == "model" and self._passes_quantized(held, ran):
            return ran if ran in _QUANTIZED else None  # an ArgMax of integers computes no numbers
        types = [self._types[k] for n in reversed(held) for k in n.outputs if k in self._types]
        # Labels, indices and masks that a node makes beside its numbers have no precision.
        stated = next((name for name in types if name in FLOATS), types[0] if types else None)
        if self._precision == "int8" and not any(is_product(n.op) for n in held):
            return "int8" if ran is not None and {"int8", "uint8"}.intersection(ran.split("->")) else stated
        if self._precision == "model":
            return stated
        if stated is not None and stated not in FLOATS:
            return None
        if stated is None and ran is not None and not FLOATS.intersection(ran.split("->")):
            return None
        return "fp32" if self._precision == "tf32" else self._precision

    def _only_indices(self, outputs: Sequence[str], ran: str | None) -> bool:
        output_types = {self._types.get(name, "?") for name in outputs}
        return bool(output_types) and ran is not None and output_types | set(ran.split("->")) <= _INDICES

    def _passes_quantized(self, held: Sequence[NodeView], ran: str | None) -> bool:
        """Whether nodes take values that the model itself quantized as integers, as a pool between products does."""
        types = [] if ran is None else ran.split("->")
        if not types or types[0] not in _QUANTIZED or not (_QUANTIZED | _INDICES).issuperset(types):
            return False
        own = {k for node in held for k in node.outputs}
        producers, read = self._source.producers, self._source.consumers
        return all(
            any(k in own or (k in producers and producers[k].op == "DequantizeLinear") for k in node.inputs)
            or all(reader.op == "QuantizeLinear" for k in node.outputs for reader in read.get(k, (node,)))
            for node in held
            if node.op not in ("QuantizeLinear", "DequantizeLinear")
        )

    def _of_quantized(self, held: Sequence[NodeView], ran: str | None) -> str | None:
        if self._precision in FLOATS:
            return self._precision
        if self._precision != "model":
            return "fp32" if self._precision == "tf32" else self._precision
        read = {k for node in held if node.op == "DequantizeLinear" for k in node.inputs[:1]}
        quantized = any(quantizes_activations(n.op, n.numbers) for n in held) or not read <= self._constant
        if quantized:
            return ran
        types = [self._types[k] for n in reversed(held) for k in n.outputs if k in self._types]
        return next((name for name in types if name in FLOATS), None)


_OWN = "onnxruntime"


def rewrite_decisions(
    rewriting: Rewriting, decisions: Mapping[str, Sequence[Decision]], device: str
) -> tuple[KernelDecision, ...]:
    """Return the decisions of one instrumented pass."""
    return merged(_all(rewriting, decisions, device))


def unreplaced_decisions(left: Iterable[UnrewrittenNode], device: str) -> tuple[KernelDecision, ...]:
    """Return why nodes that xpuruntime kernels are asked for stay with ONNX Runtime."""
    return merged(_left(node, device) for node in left)


def _left(left: UnrewrittenNode, device: str) -> KernelDecision:
    candidates = tuple(
        KernelCandidate(id=word, config=config, accepted=False, reason=left.reason, measured_us=None)
        for word, _, config in (word.partition("@") for word in left.words)
    )
    return _by_own(left, device, left.key, "fallback", candidates)


def _by_own(
    node: UnrewrittenNode | Rewrite,
    device: str,
    asked_by: str,
    source: DecisionSource,
    candidates: tuple[KernelCandidate, ...],
    *notes: str,
) -> KernelDecision:
    return KernelDecision(
        op=node.kind,
        description=f"{node.kind} on {device}, by ONNX Runtime",
        nodes=(node.node,),
        module="",
        shapes={},
        dtype="",
        device=device,
        phase="",
        asked=node.words,
        asked_by=asked_by,
        source=source,
        chosen=None,
        config="",
        candidates=candidates,
        notes=notes,
        count=None,
    )


def _all(rewriting: Rewriting, decisions: Mapping[str, Sequence[Decision]], device: str) -> Iterator[KernelDecision]:
    from xpuruntime.ops.decision_log import as_record

    timed = {measured.rewrite.node: measured for measured in rewriting.timed if measured.replacement is not None}
    for rewrite in rewriting.rewrites:
        for decision in decisions.get(rewrite.node, ()):
            record = as_record(decision, (rewrite.node,))
            yield _with_own(record, timed[rewrite.node]) if rewrite.node in timed else record
    for left in rewriting.matches.left:
        yield _left(left, device)
    for loser in timed.values():
        if not loser.wins:
            yield _stays(loser, device)


def _with_own(record: KernelDecision, timed: Timed) -> KernelDecision:
    slower = timed.stock / timed.xpuruntime
    own = KernelCandidate(
        id=_OWN,
        config="",
        accepted=True,
        reason=f"takes {slower:.2f} times as long as xpuruntime's, as an operator alone",
        measured_us=timed.stock,
    )
    note = f"measured when the session was loaded, as operators alone: {timed}"
    return msgspec.structs.replace(record, candidates=(*record.candidates, own), notes=(*record.notes, note))


def _stays(timed: Timed, device: str) -> KernelDecision:
    ratio = timed.xpuruntime / timed.stock
    candidates = (
        KernelCandidate(id=_OWN, config="", accepted=True, reason="", measured_us=timed.stock),
        KernelCandidate(
            id=f"xpuruntime.{timed.rewrite.op}",
            config="",
            accepted=True,
            reason=f"takes {ratio:.2f} times as long as ONNX Runtime's own, as an operator alone",
            measured_us=timed.xpuruntime,
        ),
    )
    note = "measured when the session was loaded, as operators alone"
    return _by_own(timed.rewrite, device, "kernels.auto_strategy", "tuned", candidates, note)
