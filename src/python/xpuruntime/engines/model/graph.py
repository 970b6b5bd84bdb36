# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Graph of an ONNX model: subgraphs and tensors, unique node names, order, fixed sizes, a copy without weights."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import onnx


class NamedNode(msgspec.Struct, frozen=True):
    """A node, its unique name, and the path of the graph that holds it ("" for the main graph)."""

    node: onnx.NodeProto
    name: str
    graph: str
    renamed: bool


def normal_domain(domain: str) -> str:
    """Return the domain with ``"ai.onnx"`` written as ``""``."""
    return "" if domain == "ai.onnx" else domain


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yield the graphs among a node's attributes, each with the attribute's name."""
    for attribute in node.attribute:
        if attribute.type == 5:
            yield attribute.name, attribute.g
        elif attribute.type == 10:
            for index, graph in enumerate(attribute.graphs):
                yield f"{attribute.name}[{index}]", graph


def graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and all subgraphs, outer ones first."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting.extend(inner for node in graph.node for _, inner in subgraphs(node))


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor that the model holds: initializers and tensor attributes, in subgraphs and functions too."""
    for graph in graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
            yield sparse.indices
        yield from _attribute_tensors(graph.node)
    for function in model.functions:
        yield from _attribute_tensors(function.node)


def _attribute_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == 4:
                yield attribute.t
            elif attribute.type == 9:
                yield from attribute.tensors


def name_nodes(model: onnx.ModelProto) -> list[NamedNode]:
    """Give every node of the graph and its subgraphs a unique name, without changing the model.

    A node keeps its own name unless an earlier node has it. Others are named after what they make: ``"Add:sum"``, and
    in a subgraph ``"loop/body/Add:sum"``. The names depend on nothing but the graph.
    """
    taken = {node.name for graph in graphs(model) for node in graph.node if node.name}
    seen: set[str] = set()
    places: list[NamedNode] = []

    def visit(graph: onnx.GraphProto, prefix: str) -> None:
        for node in graph.node:
            name = node.name
            fresh = not name or name in seen
            if fresh:
                output = next((o for o in node.output if o), str(len(places)))
                base = name = f"{prefix}{node.op_type}:{output}"
                count = 1
                while name in taken or name in seen:
                    count += 1
                    name = f"{base}#{count}"
            seen.add(name)
            places.append(NamedNode(node, name, prefix.rstrip("/"), fresh))
            for attribute, inner in subgraphs(node):
                visit(inner, f"{name}/{attribute}/")

    visit(model.graph, "")
    return places


def set_node_names(model: onnx.ModelProto) -> None:
    """Give every node of the graph and its subgraphs the name of `name_nodes`."""
    for place in name_nodes(model):
        place.node.name = place.name


def sort_nodes(graph: onnx.GraphProto) -> bool:
    """Put a graph's nodes (and those of its subgraphs) into an order in which each follows what it reads.

    Returns whether anything moved. Nodes that may stand anywhere keep their order. A cycle is left as it is.
    """
    moved = False
    for node in graph.node:
        for _, inner in subgraphs(node):
            moved |= sort_nodes(inner)
    makers = {output: i for i, node in enumerate(graph.node) for output in node.output if output}
    needs: list[set[int]] = [{makers[name] for name in reads(node) if name in makers} for node in graph.node]
    if all(max(need, default=-1) < i for i, need in enumerate(needs)):
        return moved
    readers: list[list[int]] = [[] for _ in needs]
    for i, need in enumerate(needs):
        for maker in need:
            readers[maker].append(i)
    left = [len(need) for need in needs]
    ready = [i for i, count in enumerate(left) if not count]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for reader in readers[i]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(needs):
        return moved
    nodes = [graph.node[i] for i in order]
    copies = [type(node)() for node in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(copies)
    return True


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names a node reads, also those its subgraphs capture."""
    yield from node.input
    for _, graph in subgraphs(node):
        inside = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inside |= {output for inner in graph.node for output in inner.output}
        for inner in graph.node:
            yield from (name for name in reads(inner) if name not in inside)
        yield from (value.name for value in graph.output if value.name not in inside)


def fresh_name(base: str, taken: set[str]) -> str:
    """Return `base`, numbered where it is taken, and note it as taken."""
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    taken.add(name)
    return name


def without_weights(model: onnx.ModelProto, *, keep: int = -1) -> onnx.ModelProto:
    """Return a model of the same inputs and outputs whose weights are inputs too, and which has no nodes yet.

    For inference of types and shapes, which weights would slow down. Those of up to `keep` bytes inside of the model
    stay weights, because shapes may be computed of them.
    """
    import onnx

    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "graph"
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    known = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() <= keep:
            graph.initializer.append(tensor)
        elif tensor.name not in known:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def inferred(model: onnx.ModelProto, *, keep: int = -1) -> onnx.ModelProto:
    """Return a model `without_weights` that has types and shapes of its values, as far as they are known."""
    import onnx

    light = without_weights(model, keep=keep)
    light.graph.node.extend(model.graph.node)
    light.graph.value_info.extend(model.graph.value_info)
    with contextlib.suppress(RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError):
        light = onnx.shape_inference.infer_shapes(light, data_prop=keep >= 0)
    return light


def fix_shapes(proto: onnx.ModelProto, fixed: Mapping[str, tuple[int | None, ...]]) -> None:
    """Put sizes into a graph, in place: into its inputs, and wherever the main graph uses the name of a dimension."""
    pairs: list[tuple[str, int]] = []
    for value in proto.graph.input:
        sizes = fixed.get(value.name)
        if sizes is None:
            continue
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            tensor.shape.SetInParent()
            for _ in sizes:
                tensor.shape.dim.add()
        for dim, size in zip(tensor.shape.dim, sizes, strict=True):
            if size is None:
                continue
            if dim.dim_param:
                pairs.append((dim.dim_param, size))
            dim.dim_value = size
    symbols = agreed_sizes(pairs)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]


def agreed_sizes(sizes: Iterable[tuple[int | str | None, int | None]]) -> dict[str, int]:
    """Return the name of each dimension with its one size, without those that have several or none."""
    known: dict[str, set[int | None]] = {}
    for name, size in sizes:
        if isinstance(name, str):
            known.setdefault(name, set()).add(size)
    return {name: size for name, (size, *others) in known.items() if size is not None and not others}
