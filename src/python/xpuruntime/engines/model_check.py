# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Walking an ONNX graph: unique node names, order, and whether it is valid."""

from __future__ import annotations

import difflib
import heapq
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.model_external import is_external, nbytes
from xpuruntime.engines.model_file import refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import onnx

__all__ = ["Place", "check_graph", "graphs", "name_nodes", "normal_domain", "sort_nodes", "subgraphs", "tensors"]

#: Operators that ONNX Runtime registers in the default domain although ONNX does not (any opset before the one given).
_ENGINE_OPS = {"SimplifiedLayerNormalization": 1 << 30, "LayerNormalization": 17}

_FOREIGN = "xpuruntime.foreign"

# Tensors of more bytes than this are checked here, and left out of what the ONNX checker is given.
_LARGE = 64 * 1024


class Place(NamedTuple):
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


def name_nodes(model: onnx.ModelProto) -> list[Place]:
    """Give every node of the graph and its subgraphs a unique name, without changing the model.

    A node keeps its own name unless an earlier node has it. Others are named after what they make: ``"Add:sum"``, and
    in a subgraph ``"loop/body/Add:sum"``. The names depend on nothing but the graph.
    """
    taken = {node.name for graph in graphs(model) for node in graph.node if node.name}
    seen: set[str] = set()
    places: list[Place] = []

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
            places.append(Place(node, name, prefix.rstrip("/"), fresh))
            for attribute, inner in subgraphs(node):
                visit(inner, f"{name}/{attribute}/")

    visit(model.graph, "")
    return places


def sort_nodes(graph: onnx.GraphProto) -> bool:
    """Put a graph's nodes (and those of its subgraphs) into an order in which each follows what it reads.

    Returns whether anything moved. Nodes that may stand anywhere keep their order. A cycle is left as it is.
    """
    moved = False
    for node in graph.node:
        for _, inner in subgraphs(node):
            moved |= sort_nodes(inner)
    makers = {output: i for i, node in enumerate(graph.node) for output in node.output if output}
    needs: list[set[int]] = [{makers[name] for name in _reads(node) if name in makers} for node in graph.node]
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


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names a node reads, also those its subgraphs capture."""
    yield from node.input
    for _, graph in subgraphs(node):
        inside = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inside |= {output for inner in graph.node for output in inner.output}
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in inside)
        yield from (value.name for value in graph.output if value.name not in inside)


def check_graph(model: onnx.ModelProto, where: str) -> tuple[dict[str, tuple[str, ...]], bool]:
    """Check a parsed model. The model is changed: large tensors are emptied, nodes may be sorted.

    Returns
    -------
    custom : dict of str to tuple of str
        Operators outside the ONNX standard by domain; whether an engine has them is for the engine to say.
    resorted : bool
        Whether the nodes stood in an order that ONNX does not allow.

    Raises
    ------
    ModelError
        The IR or opset version is not known here, an operator of the standard does not exist, a tensor is made twice,
        a tensor's data does not fit its shape, or the ONNX checker refuses the graph.
    """
    import onnx

    _check_versions(model, where)
    _check_single_assignment(model.graph, where)
    resorted = sort_nodes(model.graph)
    custom, legacy = _check_ops(model, where)
    for tensor in tensors(model):
        _check_data(tensor, where)
    before = [node.domain for node in legacy]
    for node in legacy:  # real operators of an engine, unknown to the checker
        node.domain = _FOREIGN
    if legacy:
        model.opset_import.append(onnx.helper.make_opsetid(_FOREIGN, 1))
    try:
        onnx.checker.check_model(model.SerializeToString())
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise refuse(where, f"the graph is invalid: {text}", "mend the exporter, or export the model again") from None
    finally:
        for node, domain in zip(legacy, before, strict=True):
            node.domain = domain
        if legacy:
            model.opset_import.pop()
    return custom, resorted


def _check_versions(model: onnx.ModelProto, where: str) -> None:
    import onnx

    if model.ir_version > onnx.IR_VERSION:
        raise refuse(
            where,
            f"its IR version is {model.ir_version}, and onnx {onnx.__version__} knows up to {onnx.IR_VERSION}",
            "upgrade with `pip install -U onnx`, or save the model with an older ir_version",
        )
    known = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if normal_domain(opset.domain) == "" and not 1 <= opset.version <= known:
            raise refuse(
                where,
                f"it uses opset {opset.version}, and onnx {onnx.__version__} knows 1 to {known}",
                "upgrade with `pip install -U onnx`, or convert it with onnx.version_converter.convert_version",
            )


def _check_ops(model: onnx.ModelProto, where: str) -> tuple[dict[str, tuple[str, ...]], list[onnx.NodeProto]]:
    """Return the operators of other domains, and the nodes of engine operators in the default domain."""
    versions = {normal_domain(o.domain): o.version for o in model.opset_import}
    functions = {(normal_domain(f.domain), f.name) for f in model.functions}
    official = {"", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "ai.onnx.preview"}
    custom: dict[str, set[str]] = {}
    legacy: list[onnx.NodeProto] = []
    unknown: dict[str, str] = {}
    judged: dict[tuple[str, str], str | None] = {}
    for graph in graphs(model):
        for node in graph.node:
            key = (normal_domain(node.domain), node.op_type)
            domain, op = key
            if key in functions:
                continue
            if domain not in official:
                custom.setdefault(domain, set()).add(op)
                continue
            version = versions.get(domain)
            if domain == "" and version is not None and version < _ENGINE_OPS.get(op, 0):
                legacy.append(node)
                custom.setdefault("", set()).add(op)
                continue
            if key not in judged:
                judged[key] = None if version is None else _unknown(op, domain, version)
            if judged[key] is not None:
                unknown.setdefault(
                    f"{domain or 'ai.onnx'}:{op}", f"{judged[key]}, at node {node.name or '(unnamed)'!r}"
                )
    if unknown:
        listed = "; ".join(f"{name} ({why})" for name, why in sorted(unknown.items()))
        raise refuse(
            where,
            f"unknown operator{'s' if len(unknown) > 1 else ''}: {listed}",
            "correct the name or raise the opset; an engine's own operator has its own domain ('com.microsoft')",
        )
    return {domain: tuple(sorted(ops)) for domain, ops in sorted(custom.items())}, legacy


def _unknown(op: str, domain: str, version: int) -> str | None:
    """Return why the standard has no such operator at this version; None when it has."""
    from onnx import defs

    if defs.has(op, max_inclusive_version=version, domain=domain):
        return None
    schemas = [s for s in defs.get_all_schemas_with_history() if s.domain == domain]
    since = [s.since_version for s in schemas if s.name == op]
    if since:
        return f"first in opset {min(since)}, and the model imports {version}"
    near = difflib.get_close_matches(op, sorted({s.name for s in schemas}), n=1)
    return f"not in opset {version}" + (f"; did you mean {near[0]!r}?" if near else "")


def _check_single_assignment(graph: onnx.GraphProto, where: str, outer: str = "") -> None:
    made: dict[str, str] = {value.name: "a graph input" for value in graph.input}
    for tensor in graph.initializer:
        if made.get(tensor.name) == "an initializer":
            raise refuse(where, f"tensor {tensor.name!r} is defined by two initializers{outer}", "rename one of them")
        made[tensor.name] = "an initializer"
    for node in graph.node:
        maker = f"node {node.name!r} ({node.op_type})" if node.name else f"a {node.op_type} node"
        for output in node.output:
            if not output:
                continue
            if output in made:
                raise refuse(
                    where,
                    f"tensor {output!r} is made twice{outer}, by {made[output]} and by {maker}",
                    "rename one of the two",
                )
            made[output] = maker
        for name, inner in subgraphs(node):
            _check_single_assignment(inner, where, f" in {name!r} of {maker}")


def _check_data(tensor: onnx.TensorProto, where: str) -> None:
    """Check that the data fits type and dims; empty a large tensor, as the checker would only copy it."""
    needed = nbytes(tensor)
    if needed is None or is_external(tensor) or not tensor.HasField("raw_data"):
        return
    size = len(tensor.raw_data)
    if size != needed:
        import onnx

        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        raise refuse(
            where,
            f"tensor {tensor.name!r} ({kind}{list(tensor.dims)}) holds {size} bytes, and needs {needed}",
            "copy, download or export the model again",
        )
    if size > _LARGE:
        tensor.raw_data = b""
        tensor.dims[:] = [0]
