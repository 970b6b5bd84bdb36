# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Scope`: one graph as the patterns read it: who makes and reads a tensor, its type, its sizes, its value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.graph import normal_domain, subgraphs, without_weights
from xpuruntime.engines.onnxruntime.rewriting.rules import DOMAIN, Rewrite
from xpuruntime.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import onnx

#: What is known of one dimension: a number, the names that it goes by, or nothing.
Dim = frozenset[Any]
Shape = tuple[Dim, ...]

#: Element types that have kernels here, as a policy writes them.
DTYPES = {1: "fp32", 10: "fp16", 11: "fp64", 16: "bf16"}
#: Operators of ONNX Runtime of which some outputs are as their first input in type and sizes.
_ALIKE: dict[tuple[str, str], tuple[int, ...]] = {
    ("", "SimplifiedLayerNormalization"): (0,),
    ("com.microsoft", "Attention"): (0,),
    ("com.microsoft", "BiasGelu"): (0,),
    ("com.microsoft", "FastGelu"): (0,),
    ("com.microsoft", "Gelu"): (0,),
    ("com.microsoft", "GroupQueryAttention"): (0,),
    ("com.microsoft", "MultiHeadAttention"): (0,),
    ("com.microsoft", "QuickGelu"): (0,),
    ("com.microsoft", "RotaryEmbedding"): (0,),
    ("com.microsoft", "SkipLayerNormalization"): (0, 3),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (0, 3),
}
#: Those of which that holds where keys and values come in apart from the queries.
_WITH_KEYS = frozenset({"GroupQueryAttention", "MultiHeadAttention"})
#: Initializers of at most so many bytes take part in shape inference by their values.
_SMALL = 4096


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node as plain values; texts as str."""
    import onnx

    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in attrs.items()}


def number(dim: Dim) -> int | None:
    """Return the size of a dimension, or ``None`` where it is not known."""
    return next((label for label in dim if isinstance(label, int)), None)


class Scope:
    """One graph, with the graphs around it."""

    def __init__(self, graph: onnx.GraphProto, path: str, outer: Scope | None, facts: _Facts) -> None:
        self.graph = graph
        self.path = path
        self._outer = outer
        self._facts = facts
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                if name:
                    self._readers.setdefault(name, []).append(node)
        self._kept = {value.name for value in graph.output} | set(_captured(graph))
        inputs = {value.name for value in graph.input} if facts.overridable or outer is not None else set()
        self._constants = {t.name: t for t in graph.initializer if t.name not in inputs}
        self._own = {value.name for value in graph.input} | {t.name for t in graph.initializer} | set(self._makers)
        self.order = {id(node): position for position, node in enumerate(graph.node)}

    def maker(self, name: str) -> onnx.NodeProto | None:
        """Return the node of this graph that makes a tensor."""
        return self._makers.get(name)

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes of this graph that read a tensor; a node that reads it twice is there twice."""
        return self._readers.get(name, [])

    def only(self, name: str, nodes: Iterable[onnx.NodeProto]) -> bool:
        """Whether nobody but `nodes` reads a tensor: neither another node, nor a subgraph, nor the caller."""
        allowed = {id(node) for node in nodes}
        return name not in self._kept and all(id(node) in allowed for node in self.readers(name))

    def constant(self, name: str) -> onnx.TensorProto | None:
        """Return the value that a tensor always has, which may lie in another file."""
        import onnx

        if name in self._constants:
            return self._constants[name]
        node = self._makers.get(name)
        if node is not None:
            if node.op_type == "Constant" and normal_domain(node.domain) == "":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        return attribute.t
                    if attribute.name == "value_float":
                        return onnx.helper.make_tensor("", 1, [], [attribute.f])
            return None
        return self._outer.constant(name) if self._outer is not None and name not in self._own else None

    def value(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a constant as an array; ``None`` for what is no constant, or lies in another file."""
        from onnx import numpy_helper

        tensor = self.constant(name)
        if tensor is None or tensor.data_location == 1:
            return None
        array: np.ndarray[Any, Any] = numpy_helper.to_array(tensor)
        return array

    def scalar(self, name: str) -> float | None:
        """Return the number of a constant of one element; ``None`` for anything else."""
        tensor = self.constant(name)
        if tensor is None or any(dim != 1 for dim in tensor.dims) or len(tensor.dims) > 1:
            return None
        value = self.value(name)
        return None if value is None else float(value.reshape(-1)[0])

    def type(self, name: str) -> int:
        """Return the element type of a tensor; 0 where it is not known."""
        scope: Scope | None = self
        while scope is not None:
            dtype = self._facts.types.get((scope.path, name))
            if dtype:
                return dtype
            scope = scope._outer
        return 0

    def shape(self, name: str) -> Shape | None:
        """Return what is known of the sizes of a tensor; ``None`` where even their number is not known."""
        scope: Scope | None = self
        while scope is not None:
            known = self._facts.shapes.get((scope.path, name))
            if known is not None:
                return known
            scope = scope._outer
        return None


def scopes(model: onnx.ModelProto, fp32_as: int = 1) -> list[Scope]:
    """Return the graphs of a model, outer ones first. Weights are not read; nodes have unique names.

    `fp32_as` is the element type that fp32 tensors will have, where the graph is yet to be converted.
    """
    facts = _Facts(model, fp32_as)
    scopes: list[Scope] = []

    def visit(graph: onnx.GraphProto, path: str, outer: Scope | None) -> None:
        scope = Scope(graph, path, outer, facts)
        scopes.append(scope)
        for node in graph.node:
            for attribute, inner in subgraphs(node):
                visit(inner, f"{path}/{node.name}/{attribute}".lstrip("/"), scope)

    visit(model.graph, "", None)
    return scopes


class _Facts:
    """Types and sizes of all tensors, by the path of their graph and their name."""

    def __init__(self, model: onnx.ModelProto, fp32_as: int) -> None:
        self.overridable = model.ir_version >= 4
        self.types: dict[tuple[str, str], int] = {}
        self.shapes: dict[tuple[str, str], Shape] = {}
        self._take(model.graph, "", "")
        light = _light(model)
        inferred = _infer(light)
        if inferred is not None:
            self._take(inferred.graph, "", "inferred ")
        if fp32_as != 1:
            self.types = {key: fp32_as if kind == 1 else kind for key, kind in self.types.items()}

    def _take(self, graph: onnx.GraphProto, path: str, label: str) -> None:
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type"):
                form = value.type.tensor_type
                self.types.setdefault((path, value.name), form.elem_type)
                if form.HasField("shape"):
                    self._shape(path, value.name, [_dim(d, label) for d in form.shape.dim])
        for tensor in graph.initializer:
            self.types[path, tensor.name] = tensor.data_type
            self.shapes[path, tensor.name] = tuple(frozenset((int(d),)) for d in tensor.dims)
        for node in graph.node:
            for attribute, inner in subgraphs(node):
                self._take(inner, f"{path}/{node.name}/{attribute}".lstrip("/"), label)

    def _shape(self, path: str, name: str, dims: list[Dim]) -> None:
        """Add what is known: a model's own names of sizes and those that inference gives hold side by side."""
        before = self.shapes.get((path, name))
        if before is None or len(before) != len(dims):
            self.shapes[path, name] = tuple(dims)
        else:
            self.shapes[path, name] = tuple(a | b for a, b in zip(before, dims, strict=True))


def _dim(dim: Any, label: str) -> Dim:
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return frozenset((int(dim.dim_value),))
    if not dim.dim_param:
        return frozenset()
    # Names that inference makes up begin anew in every run of it, so they are kept apart from the model's own.
    return frozenset((f"{label}{dim.dim_param}" if dim.dim_param.startswith("unk__") else dim.dim_param,))


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with large weights turned into inputs and without the shapes that it states inside."""
    import onnx

    light = without_weights(model, keep=_SMALL)
    graph = light.graph
    for node in model.graph.node:
        same = _same(node)
        if same is None:
            graph.node.append(node)
        else:
            graph.node.extend(onnx.helper.make_node("Identity", [source], [target]) for source, target in same)
    return light


def _same(node: onnx.NodeProto) -> list[tuple[str, str]] | None:
    """Return the inputs and outputs that are alike in type and sizes, for an operator that inference does not know."""
    pairs = _ALIKE.get((normal_domain(node.domain), node.op_type))
    if pairs is None or any(a.name == "qkv_hidden_sizes" for a in node.attribute):
        return None
    if node.op_type in _WITH_KEYS and not (len(node.input) > 2 and node.input[1] and node.input[2]):
        return None  # packed: the result is narrower than what comes in
    edges = [(node.input[0], node.output[i]) for i in pairs if i < len(node.output) and node.output[i]]
    return edges or None


def _infer(light: onnx.ModelProto) -> onnx.ModelProto | None:
    import onnx

    for data_prop in (True, False):
        try:
            return onnx.shape_inference.infer_shapes(light, check_type=False, strict_mode=False, data_prop=data_prop)
        except (RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError):
            continue
    return None


def _captured(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that subgraphs of a graph's nodes read, whoever makes them."""
    for node in graph.node:
        for _, inner in subgraphs(node):
            yield from (value.name for value in inner.output)
            for below in inner.node:
                yield from below.input
            yield from _captured(inner)


_NAMES = {"fp32": "float32", "fp16": "float16", "fp64": "float64", "bf16": "bfloat16", "bool": "bool"}


class Terms(NamedTuple):
    """What holds for every node of a session."""

    device: str
    allow_tf32: bool = False
    deterministic: bool = False

    def describe(
        self, op: str, operands: dict[str, dict[str, Any]], attributes: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return an operation as `KernelRegistry.supports` takes it."""
        attrs = dict(attributes or {}, deterministic=self.deterministic)
        for operand in operands.values():
            operand["alignment"] = 256 if self.device.startswith("cuda") else 64
        return {"op": op, "phase": "infer", "device": self.device, "operands": operands, "attributes": attrs}

    def rounds(self, dtype: str | None) -> bool:
        """Whether products of this type may be rounded to TF32."""
        return self.allow_tf32 and dtype == "fp32" and self.device.startswith("cuda")


def operand(dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> dict[str, Any]:
    """Return one operand, contiguous unless strides are given."""
    description: dict[str, Any] = {"dtype": _NAMES[dtype], "shape": tuple(shape)}
    if strides is not None:
        description["strides"] = tuple(strides)
    return description


def sizes(shape: Shape, stand_in: int) -> list[int]:
    """Return the sizes of a shape, with `stand_in` for those that are not known."""
    return [size if (size := number(dim)) is not None else stand_in for dim in shape]


def known_product(shape: Shape) -> int | None:
    """Return the product of all sizes, or ``None`` where one is not known."""
    numbers = [number(dim) for dim in shape]
    return math.prod(n for n in numbers if n is not None) if None not in numbers else None


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to have one size."""
    return bool(a & b)


def rewrite(model: onnx.ModelProto, rewrites: Iterable[Rewrite], rules: str, *, deterministic: bool) -> onnx.ModelProto:
    """Return a copy of a model with `rewrites` applied. Node names, and names of what they make, stay."""
    import onnx

    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    by_graph: dict[str, list[Rewrite]] = {}
    for rewrite in rewrites:
        by_graph.setdefault(rewrite.graph, []).append(rewrite)
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
    missing = [name for rewrite in rewrites for name in rewrite.nodes if name not in names]
    if missing:
        msg = f"the model has no node {missing[0]!r} any more; it changed since it was loaded: open a new session"
        raise ModelError(msg)
    gone = {name for rewrite in rewrites for name in rewrite.nodes}
    places = {node.name: index for index, node in enumerate(graph.node)}
    # Where the last of the nodes stood, everything that is read is there, and nothing has read the output yet.
    at = {max(places[name] for name in edit.nodes): edit for edit in rewrites}
    nodes: list[onnx.NodeProto] = []
    for position, node in enumerate(graph.node):
        if position in at:
            nodes += _made(at[position], shared)
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


def _made(edit: Rewrite, shared: dict[str, Any]) -> list[onnx.NodeProto]:
    import onnx

    make = onnx.helper.make_node
    nodes = [make("Transpose", [t.source], [t.result], name=t.name, perm=list(t.perm)) for t in edit.before]
    attrs = {**edit.attributes, **shared, "node": edit.node}
    nodes.append(make(edit.op, list(edit.inputs), [edit.output], name=edit.node, domain=DOMAIN, **attrs))
    return nodes
