# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`rewrite`: put xpuruntime operators into a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.graph import subgraphs
from xpuruntime.engines.onnxruntime.rewriting.records import DOMAIN, Rewrite
from xpuruntime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx

__all__ = ["rewrite"]


def rewrite(model: onnx.ModelProto, rewrites: Iterable[Rewrite], rules: str, *, deterministic: bool) -> onnx.ModelProto:
    """Return a copy of a model with `rewrites` applied. Node names, and names of what they make, stay."""
    import onnx

    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    by_graph: dict[str, list[Rewrite]] = {}
    for one in rewrites:
        by_graph.setdefault(one.graph, []).append(one)
    if not by_graph:
        return edited

    def visit(graph: onnx.GraphProto, path: str) -> None:
        for node in graph.node:  # before the nodes are replaced by copies
            for attribute, inner in subgraphs(node):
                visit(inner, f"{path}/{node.name}/{attribute}".lstrip("/"))
        if path in by_graph:
            _edit(graph, by_graph[path], {"rules": rules, "deterministic": int(deterministic)})

    visit(edited.graph, "")
    if all(o.domain != DOMAIN for o in edited.opset_import):
        edited.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return edited


def _edit(graph: onnx.GraphProto, rewrites: list[Rewrite], shared: dict[str, Any]) -> None:
    import onnx

    names = {node.name for node in graph.node}
    missing = [name for one in rewrites for name in one.nodes if name not in names]
    if missing:
        msg = f"the model has no node {missing[0]!r} any more; it changed since it was loaded: open a new session"
        raise ModelError(msg)
    gone = {name for one in rewrites for name in one.nodes}
    places = {node.name: place for place, node in enumerate(graph.node)}
    # Where the last of the nodes stood, everything that is read is there, and nothing has read the output yet.
    at = {max(places[name] for name in one.nodes): one for one in rewrites}
    nodes: list[onnx.NodeProto] = []
    for place, node in enumerate(graph.node):
        if place in at:
            nodes += _made(at[place], shared)
        elif node.name not in gone:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            nodes.append(copy)
    left = {name for node in nodes for name in node.output} | {value.name for value in graph.output}
    known = [value for value in graph.value_info if value.name in left]
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in known]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    del graph.node[:]
    graph.node.extend(nodes)


def _made(one: Rewrite, shared: dict[str, Any]) -> list[onnx.NodeProto]:
    import onnx

    make = onnx.helper.make_node
    nodes = [make("Transpose", [t.source], [t.made], name=t.name, perm=list(t.perm)) for t in one.before]
    given = {**one.attributes, **shared, "node": one.node}
    nodes.append(make(one.op, list(one.inputs), [one.output], name=one.node, domain=DOMAIN, **given))
    return nodes
