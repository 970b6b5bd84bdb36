# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GraphView`: an ONNX graph with its subgraphs laid flat, so that two versions of it can be compared tensor by tensor.

A tensor's key is its name. Inside a subgraph it is ``<name of the control node>.<attribute>/<name>``: branches may use
the same names twice, and the key must come out alike in the source graph and in the optimized one, which renames
outputs of control nodes. The first output stands for a control node without a name.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.onnxruntime.precision_controls import arithmetic_of
from xpuruntime.engines.precision.types import main_precision, precision_name, read_and_written

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, TensorSeen

#: ``AttributeProto.INT``.
_INT = 2
#: Initializers up to this many bytes are compared by content, larger ones by name.
_SMALL = 256


@dataclass(frozen=True, slots=True, eq=False)
class NodeView:
    """One node.

    `inputs` are keys; those after the first `explicit` ones are what its subgraphs read from outside. `numbers` are its
    integer attributes.
    """

    position: int
    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: bytes
    explicit: int
    scope: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_subgraph(self) -> bool:
        """Whether it is an If, Loop, Scan or another node that holds a graph."""
        return len(self.inputs) > self.explicit or self.op in ("If", "Loop", "Scan", "SequenceMap")


@dataclass(slots=True)
class GraphView:
    """A flat graph."""

    nodes: list[NodeView] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)
    outputs: list[str] = field(default_factory=list)
    initializers: dict[str, bytes] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    producers: dict[str, NodeView] = field(default_factory=dict)
    consumers: dict[str, list[NodeView]] = field(default_factory=dict)
    removed: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)

    def canonical(self, key: str) -> str:
        """Follow the outputs of an inlined branch to the tensors inside it."""
        while key in self.aliases:
            key = self.aliases[key]
        return key


def view(model: Any, inline: Collection[str] = ()) -> GraphView:
    """Lay a model flat."""
    builder = _Builder(frozenset(inline))
    graph = model.graph
    builder.declare(graph, "", ())
    builder.result.inputs.update(i.name for i in graph.input if i.name not in builder.result.initializers)
    builder.walk(graph, "", ())
    out = builder.result
    out.outputs = [out.canonical(o.name) for o in graph.output]
    out.nodes = [_canonical(out, n) for n in out.nodes] if out.aliases else out.nodes
    for node in out.nodes:
        for key in node.outputs:
            if key:
                out.producers[key] = node
        for key in dict.fromkeys(node.inputs):
            if key:
                out.consumers.setdefault(key, []).append(node)
    return out


def _canonical(graph: GraphView, node: NodeView) -> NodeView:
    inputs = tuple(graph.canonical(k) for k in node.inputs)
    if inputs == node.inputs:
        return node
    return NodeView(
        position=node.position,
        name=node.name,
        op=node.op,
        domain=node.domain,
        inputs=inputs,
        outputs=node.outputs,
        attributes=node.attributes,
        explicit=node.explicit,
        scope=node.scope,
        numbers=node.numbers,
    )


class _Builder:
    def __init__(self, inline: frozenset[str]) -> None:
        self.result = GraphView()
        self._inline = inline
        self._names: dict[str, int] = {}
        self._declared: dict[str, set[str]] = {}
        self._booleans: dict[str, bool] = {}

    def declare(self, graph: Any, scope: str, chain: tuple[str, ...]) -> None:
        """Enter the names that `graph` defines, so that inner graphs can tell them from their own."""
        names = {i.name for i in graph.input} | {i.name for i in graph.initializer}
        names |= {s.values.name for s in graph.sparse_initializer}
        names |= {o for n in graph.node for o in n.output if o}
        self._declared[scope] = names
        here = (*chain, scope)
        for item in graph.initializer:
            key = self._key(item.name, here)
            self.result.initializers[key] = _digest(item, key)
            self.result.dtypes[key] = item.data_type
            if item.data_type == 9:  # bool: may be the condition of an If
                value = item.raw_data[:1] or bytes(item.int32_data[:1])
                self._booleans[key] = bool(value and value[0])
        for sparse in graph.sparse_initializer:
            key = self._key(sparse.values.name, here)
            self.result.initializers[key] = key.encode()
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
                self.result.dtypes[self._key(value.name, here)] = value.type.tensor_type.elem_type

    def walk(self, graph: Any, scope: str, chain: tuple[str, ...]) -> set[str]:
        """Append the nodes of `graph`; return the keys it reads from outside its own scope."""
        here = (*chain, scope)
        captured: set[str] = set()
        for node in graph.node:
            subgraphs = [(a.name, g) for a in node.attribute for g in ([a.g] if a.HasField("g") else a.graphs)]
            keys = tuple(self._key(n, here) if n else "" for n in node.input)
            outputs = tuple(self._key(n, here) if n else "" for n in node.output)
            captured.update(k for k in keys if k and not self._own(k, scope))
            extra: set[str] = set()
            chosen = self._branch(node, keys, outputs) if subgraphs else None
            holder = node.name or next((o for o in outputs if o), node.op_type)
            for index, (name, inner) in enumerate(subgraphs):
                inner_scope = f"{holder}.{name}" if len(subgraphs) < 3 else f"{holder}.{name}{index}"
                self.declare(inner, inner_scope, here)
                self.result.results.update(self._key(output.name, (*here, inner_scope)) for output in inner.output)
                start = len(self.result.nodes)
                extra |= self.walk(inner, inner_scope, here)
                if chosen is None:
                    self.result.inputs.update(self._key(i.name, (*here, inner_scope)) for i in inner.input)
                elif name == chosen:
                    for outer, own in zip(outputs, inner.output, strict=True):
                        self.result.aliases[outer] = self._key(own.name, (*here, inner_scope))
                else:
                    for position in range(start, len(self.result.nodes)):
                        self.result.removed[position] = "its branch is never taken: the condition is constant"
            captured |= {k for k in extra if not self._own(k, scope)}
            position = len(self.result.nodes)
            if chosen is not None:
                self.result.removed[position] = "its condition is constant: replaced by the branch that is taken"
            self._note_boolean(node, outputs)
            self.result.nodes.append(
                NodeView(
                    position=position,
                    name=self._unique(node),
                    op=node.op_type,
                    domain="" if node.domain == "ai.onnx" else node.domain,
                    inputs=() if chosen is not None else keys + tuple(sorted(extra - set(keys))),
                    outputs=() if chosen is not None else outputs,
                    attributes=_attributes(node, subgraphs),
                    explicit=len(keys),
                    scope=scope,
                    numbers={str(a.name): int(a.i) for a in node.attribute if a.type == _INT},
                )
            )
        return captured

    def _unique(self, node: Any) -> str:
        name = node.name or f"({node.op_type})"
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return str(name) if count == 0 else f"{name}#{count + 1}"

    def _branch(self, node: Any, keys: tuple[str, ...], outputs: tuple[str, ...]) -> str | None:
        if node.op_type != "If" or not outputs or outputs[0] not in self._inline or keys[0] not in self._booleans:
            return None
        return "then_branch" if self._booleans[keys[0]] else "else_branch"

    def _note_boolean(self, node: Any, outputs: tuple[str, ...]) -> None:
        if node.op_type == "Constant" and outputs:
            for attribute in node.attribute:
                if attribute.name == "value" and attribute.t.data_type == 9:
                    value = attribute.t.raw_data[:1] or bytes(attribute.t.int32_data[:1])
                    self._booleans[outputs[0]] = bool(value and value[0])

    def _key(self, name: str, chain: Iterable[str]) -> str:
        for scope in reversed(tuple(chain)):
            if name in self._declared.get(scope, ()):
                return f"{scope}/{name}" if scope else name
        return name

    def _own(self, key: str, scope: str) -> bool:
        return key.startswith(f"{scope}/") if scope else True


def _digest(item: Any, key: str) -> bytes:
    external = item.data_location == 1
    if external or len(item.raw_data) > _SMALL or item.ByteSize() > _SMALL + len(item.name) + 64:
        return key.encode()
    copy = type(item)()
    copy.CopyFrom(item)
    copy.ClearField("name")
    copy.ClearField("doc_string")
    return hashlib.sha256(bytes(copy.SerializeToString(deterministic=True))).digest()


def _attributes(node: Any, subgraphs: list[Any]) -> bytes:
    digest = hashlib.sha256()
    if subgraphs:
        digest.update(repr((node.name, tuple(node.output))).encode())
    for attribute in sorted(node.attribute, key=lambda a: str(a.name)):
        if not attribute.HasField("g") and not attribute.graphs:
            digest.update(attribute.SerializeToString(deterministic=True))
    return digest.digest()


_PROVIDER_DEVICES = {
    "CPUExecutionProvider": "cpu",
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "ROCMExecutionProvider": "rocm",
    "MIGraphXExecutionProvider": "rocm",
    "CoreMLExecutionProvider": "metal",
    "DmlExecutionProvider": "dml",
    "QNNExecutionProvider": "npu",
    "XnnpackExecutionProvider": "cpu",
    "DnnlExecutionProvider": "cpu",
}
_SPATIAL = (
    "Conv",
    "Pool",
    "BatchNormalization",
    "Resize",
    "Upsample",
    "LRN",
    "DepthToSpace",
    "SpaceToDepth",
    "GridSample",
)


def provider_device(provider: str, requested: str) -> str:
    """Return the device that a provider stands for; its number is that of the device asked for.

    A provider that is not known here is taken to run on the device asked for, unless that is the CPU.
    """
    family = requested.partition(":")[0]
    kind = _PROVIDER_DEVICES.get(provider)
    if kind is None:
        return requested if family != "cpu" else provider.removesuffix("ExecutionProvider").lower() or requested
    if kind == family:
        return requested
    return kind if kind in ("cpu", "npu", "metal") else f"{kind}:0"


def is_partition(op: str, provider: str) -> bool:
    """Whether an executed node is a compiled partition, whose inside ONNX Runtime cannot show."""
    return op == "EPContext" or (bool(provider) and op.startswith(f"{provider}_"))


def layout_of(node: NodeView) -> str | None:
    """Return the layout a spatial operator ran in, from its domain and name; None for others."""
    if node.domain == "com.microsoft.nchwc":
        return "nchwc"
    if node.domain == "com.ms.internal.nhwc" or node.op.startswith("Nhwc"):
        return "nhwc"
    return "nchw" if any(word in node.op for word in _SPATIAL) and node.op != "GlobalLpPool" else None


def computed_precision(event: NodeEvent, numbers: Mapping[str, int] | None = None) -> str | None:
    """Return the precision in which a node multiplied; of most, that is what it read and wrote.

    Such as ``"fp16"``, or ``"fp32->uint8"`` where these differ; ``None`` where it is not known.
    """
    inputs = (precision_name(tensor.dtype) for tensor in event.inputs)
    inside = arithmetic_of(event.op, event.provider, inputs, numbers)
    if inside is not None:
        return None if inside == "unknown" else inside
    return read_and_written(_main(event.inputs), _main(event.outputs))


def _main(tensors: Sequence[TensorSeen]) -> str | None:
    return main_precision((precision_name(tensor.dtype), tensor.elements) for tensor in tensors)


def of_whole_names(graph: GraphView, events: Sequence[NodeEvent]) -> list[NodeEvent]:
    """Return the events whose node is known beyond doubt, with its whole name.

    An event of which no node has the name and the operator belongs to the one node of that operator whose name begins
    so. Where that may be several, or where more events than nodes have a name, they are left out.
    """
    nodes = Counter((node.name.partition("#")[0], node.op) for node in graph.nodes)
    said = Counter((event.name, event.op) for event in events)
    names = []
    for event in events:
        key = (event.name, event.op)
        if key in nodes or event.name == f"{event.op}_{event.index}":
            if said[key] <= nodes.get(key, said[key]):
                names.append(event)
            continue
        longer = [name for name, op in nodes if op == event.op and name.startswith(event.name)]
        if not longer:
            names.append(event)  # of an operator that the graph calls otherwise
        elif len(longer) == said[key] == 1 and (longer[0], event.op) not in said:
            names.append(msgspec.structs.replace(event, name=longer[0]))
    return names


#: What ONNX Runtime numbers in the order in which it inserts it.
_NUMBERED = re.compile(r"_token_\d+|_\d+$")


def settled_order(graph: GraphView) -> list[NodeView]:
    """Return the nodes in an order that is the same in every load: each after what it reads, then by name.

    ONNX Runtime orders and numbers what it inserts anew each time.
    """
    waiting = {node.position: {key for key in node.inputs if key in graph.producers} for node in graph.nodes}
    readers: dict[str, list[NodeView]] = {}
    for node in graph.nodes:
        for key in waiting[node.position]:
            readers.setdefault(key, []).append(node)
    ready = [(_settled_name(node), node.position, node) for node in graph.nodes if not waiting[node.position]]
    heapq.heapify(ready)
    ordered: list[NodeView] = []
    while ready:
        node = heapq.heappop(ready)[2]
        ordered.append(node)
        for key in node.outputs:
            for reader in readers.pop(key, ()):
                waiting[reader.position].discard(key)
                if not waiting[reader.position]:
                    heapq.heappush(ready, (_settled_name(reader), reader.position, reader))
    seen = {node.position for node in ordered}
    return ordered + [node for node in graph.nodes if node.position not in seen]  # none, in a graph without cycles


def _settled_name(node: NodeView) -> tuple[str, ...]:
    """Return what orders nodes: their names without the numbers that ONNX Runtime gives out."""
    return (*(_NUMBERED.sub("", key) for key in (*node.outputs, *node.inputs)), node.op)
