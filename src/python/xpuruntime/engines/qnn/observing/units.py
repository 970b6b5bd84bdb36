# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attribution of the operations of a compiled QNN graph to the nodes of the source model: each node exactly once.

Two steps. ONNX Runtime first rewrites the source graph: it folds constants, fuses, moves to NHWC and names what it
made ``conv1_token_1`` or ``r1_DequantizeLinear/duplicated``; that graph is joined to the source on tensors, as for any
provider. QNN then compiles groups of its nodes into operations, and its trace says which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.observation import CONVERSIONS, UnitIds, check_complete, folded_unit, is_product
from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView, view
from xpuruntime.engines.onnxruntime.observing.node_matching import LOST, Shares, match, share_out, source_facts
from xpuruntime.engines.precision.types import FLOATS, meets, model_precisions
from xpuruntime.engines.qnn.opening import PROVIDER, Placed
from xpuruntime.evidence.records import Unit

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.qnn.observing.records import SessionTrace

#: QNN's operators that change a type and no value.
INSERTED_CASTS = frozenset({"Cast", "Convert", "Quantize", "Dequantize"})
#: QNN's operators whose definition fixes the layout of images.
_SPATIAL = ("Conv2d", "Conv3d", "TransposeConv", "DepthWiseConv", "Pool", "Resize", "BatchNorm", "InstanceNorm")
_ABSORBED = "compiled away by QNN: its trace names no operation for it"

_INDICES = frozenset({"int64", "int32", "bool"})


def units_of(
    request: Request, source: ModelSource, recorded: SessionTrace, placed: Sequence[Placed]
) -> tuple[tuple[Unit, ...], tuple[str, ...], bool]:
    """Return the units of a request's model, as `join_units`; of a model that was quantized here, in its own nodes."""
    execution = request.policy.execution
    quantized = source.quantized
    if quantized is None:
        model = request.model.named_proto()
    else:
        import onnx

        model = onnx.load_model_from_string(quantized.data)
    units, notes, partial = join_units(
        model,
        recorded,
        placed,
        device=request.device,
        precision=execution.precision,
        allow_cpu_ops=execution.allow_cpu_ops,
    )
    if quantized is not None:
        from xpuruntime.engines.quantization import in_source_terms

        units = in_source_terms(units, quantized, request.model)
    return units, notes, partial


def join_units(
    model: Any,
    recorded: SessionTrace,
    placed: Sequence[Placed],
    *,
    device: str,
    precision: str,
    allow_cpu_ops: Collection[str] = (),
) -> tuple[tuple[Unit, ...], tuple[str, ...], bool]:
    """Return the units without times, what could not be seen, and whether anything is missing."""
    joiner = _Joiner(model, recorded, placed, device, precision, frozenset(allow_cpu_ops))
    return joiner.run()


class _Joiner:
    def __init__(
        self,
        model: Any,
        recorded: SessionTrace,
        placed: Sequence[Placed],
        device: str,
        precision: str,
        allowed: frozenset[str],
    ) -> None:
        self.recorded, self.device, self.precision, self.allowed = recorded, device, precision, allowed
        self.placed = {node.name: node for node in placed}
        self.source = view(model)
        self.types = model_precisions(model, self.source.dtypes)
        self.graph = view(_as_model(recorded.nodes, self.placed, self.source))
        facts = source_facts(self.source)
        self.matched = match(self.source, self.graph, facts)
        self.shares: Shares = share_out(self.source, self.graph, facts, self.matched)
        self._id = UnitIds()

    def run(self) -> tuple[tuple[Unit, ...], tuple[str, ...], bool]:
        groups, served = self._groups()
        units = [
            self._operation(index, groups.get(index, []), served.get(index, []))
            for index in range(len(self.recorded.mappings))
        ]
        taken = {position for held in groups.values() for position in held}
        units += [self._left(node) for node in self.graph.nodes if node.position not in taken]
        idle = self._idle()
        units += idle
        lost = [unit for unit in units if unit.status == "unobservable" and unit.relation == "folded"]
        notes = list(self.recorded.notes)
        if lost:
            notes.append(f"{len(lost)} source nodes were not found in the graph that QNN was given")
        check_complete(units, (node.name for node in self.source.nodes))
        return tuple(units), tuple(notes), bool(lost or self.recorded.notes)

    def _groups(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Give each node of the partitioned graph to one operation; other operations for it serve it."""
        by_name = {node.name: node.position for node in self.graph.nodes}
        owner: dict[int, int] = {}
        for index, mapping in enumerate(self.recorded.mappings):
            if mapping.operation in by_name and mapping.operation in mapping.nodes:
                owner.setdefault(by_name[mapping.operation], index)
        for index, mapping in enumerate(self.recorded.mappings):
            for name in mapping.nodes:
                if name in by_name:
                    owner.setdefault(by_name[name], index)
        groups: dict[int, list[int]] = {}
        served: dict[int, list[int]] = {}
        for index, record in enumerate(self.recorded.mappings):
            for name in record.nodes:
                position = by_name.get(name)
                if position is not None:
                    (groups if owner[position] == index else served).setdefault(index, []).append(position)
        return {index: sorted(held) for index, held in groups.items()}, served

    def _operation(self, index: int, held: list[int], helped: list[int]) -> Unit:
        mapping = self.recorded.mappings[index]
        operation = self.recorded.operations.get(mapping.operation)
        owned = sorted({i for position in held for i in self.shares.owned.get(position, ())})
        serves = {i for position in held for i in self.shares.serves.get(position, ())}
        serves |= {i for position in helped for i in self.shares.owned.get(position, ())}
        names = tuple(self.source.nodes[i].name for i in owned)
        keys = (k for position in held for k in self.graph.nodes[position].outputs)
        written = (self.matched.get(k) for k in keys if not self._inside(k, held))
        outputs = tuple(dict.fromkeys(k for k in written if k)) if names else ()
        ran = operation.precision if operation is not None else None
        wanted = None if not names and mapping.op in INSERTED_CASTS else self._wanted(owned or sorted(serves), ran)
        return Unit(
            id=self._id(mapping.operation),
            op=mapping.op,
            relation="inserted" if not names else "exact" if len(names) == 1 else "fused",
            source_nodes=names,
            outputs=outputs,
            serves=tuple(self.source.nodes[i].name for i in sorted(serves - set(owned))),
            engine="qnn",
            device=self.device,
            provider=PROVIDER,
            precision_requested=wanted,
            precision_run=ran,
            layout="nhwc" if any(word in mapping.op for word in _SPATIAL) else None,
            status="substituted" if names and wanted and ran and not meets(wanted, ran) else "honoured",
        )

    def _inside(self, key: str, held: list[int]) -> bool:
        readers = [node.position for node in self.graph.consumers.get(key, ())]
        return bool(readers) and all(position in held for position in readers) and key not in self.graph.outputs

    def _left(self, node: NodeView) -> Unit:
        """Return the unit of a node that no operation of QNN is for: one on the CPU, or one compiled away."""
        owned = self.shares.owned.get(node.position, [])
        names = tuple(self.source.nodes[i].name for i in owned)
        placed = self.placed.get(node.name)
        away = placed is not None and placed.provider != PROVIDER
        ops = {node.op, *(self.source.nodes[i].op for i in owned)}
        return Unit(
            id=self._id(node.name),
            op=node.op,
            relation=("exact" if len(names) == 1 else "fused" if names else "inserted") if away else "folded",
            source_nodes=names,
            outputs=tuple(dict.fromkeys(k for k in (self.matched.get(k) for k in node.outputs) if k)),
            engine="qnn",
            device="cpu" if away else "none",
            provider=placed.provider if placed is not None else None,
            precision_requested=self._wanted(owned) if away else None,
            placement_reason="QNN does not take it, and allow_cpu_ops lists it" if away else _ABSORBED,
            placement_source="policy" if away else "log",
            status="honoured" if not away or ops & self.allowed else "substituted",
        )

    def _idle(self) -> list[Unit]:
        return [
            folded_unit(
                node, "qnn", reason, id=self._id(node.name), status="unobservable" if reason == LOST else "honoured"
            )
            for node, reason in ((self.source.nodes[i], why) for i, why in sorted(self.shares.idle.items()))
        ]

    def _wanted(self, nodes: list[int], ran: str | None = None) -> str | None:
        """Return the precision asked for of a unit; ``None`` where it computes no numbers that one applies to."""
        # Under int8, what is no product is in the types of the graph: in 8 bits or in floats, where nodes of both kinds
        # became one operation. Indices, which QNN makes 32 bits wide, have no precision.
        held = [self.source.nodes[i] for i in nodes]
        if not held or {node.op for node in held} <= CONVERSIONS:
            return None
        types = [self.types[k] for node in reversed(held) for k in node.outputs if k in self.types]
        stated = types[0] if types else None
        if self.precision == "model":
            return stated
        if self.precision == "int8" and not any(is_product(node.op) for node in held):
            both = [type_ for type_ in types if type_ not in _INDICES]
            return next((precision for precision in both if ran and meets(precision, ran)), both[0] if both else None)
        return None if stated is not None and stated not in FLOATS and self.precision != "int8" else self.precision


def _as_model(nodes: Sequence[dict[str, Any]], placed: dict[str, Placed], source: GraphView) -> Any:
    """Return a model without weights that has these nodes, in an order in which they can run."""
    from onnx import TensorProto, helper

    producers = {key: number for number, node in enumerate(nodes) for key in node["outputs"] if key}
    order: list[int] = []
    state = [0] * len(nodes)
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            number = stack[-1]
            above = [producers[k] for k in nodes[number]["inputs"] if k in producers and state[producers[k]] == 0]
            if state[number] == 0:
                state[number] = 1
            if above:
                stack.extend(above)
                continue
            stack.pop()
            if state[number] == 1:
                state[number] = 2
                order.append(number)
    model_nodes = []
    for number in order:
        node = nodes[number]
        domain = placed[node["name"]].domain if node["name"] in placed else ""
        model_nodes.append(
            helper.make_node(node["op"], node["inputs"], node["outputs"], name=node["name"], domain=domain)
        )
    read = dict.fromkeys(k for node in nodes for k in node["inputs"] if k and k not in producers)
    consumed = set(read) | {k for node in nodes for k in node["inputs"]}
    last = [k for k in producers if k not in consumed or k in source.outputs]
    inputs = [helper.make_tensor_value_info(k, TensorProto.UNDEFINED, None) for k in read if k in source.inputs]
    weights = [TensorProto(name=k) for k in read if k not in source.inputs]
    outputs = [helper.make_tensor_value_info(k, TensorProto.UNDEFINED, None) for k in last]
    return helper.make_model(helper.make_graph(model_nodes, "partitioned", inputs, outputs, weights))
