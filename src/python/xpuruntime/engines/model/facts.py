# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Facts read off an ONNX graph: its values, its nodes, its weights, and how it is quantized."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.engines.model.external import element_count
from xpuruntime.engines.model.graph import NamedNode, graphs, normal_domain, reads, subgraphs, tensors

if TYPE_CHECKING:
    import onnx


#: Operators of the standard that always draw random numbers; ``Dropout`` does in training mode.
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output.

    Attributes
    ----------
    name : str
    dtype : str
        NumPy's name, such as ``"float32"``; also ``"bfloat16"``, ``"float8e4m3fn"``, ``"int4"``, ``"string"``, and
        ``"unknown"``. Of the elements, where `kind` is no tensor.
    shape : tuple of int, str or None, or None
        A number, the name of a symbolic dimension, or None for a dimension that is not known. None in place of the
        tuple: the rank is not known.
    kind : {"tensor", "sparse_tensor", "sequence", "optional", "map", "unknown"}
    limits : tuple of (int, int) or None
        Least and largest size of each dimension that a policy states, ``None`` for the others; empty where it states
        none.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    kind: Literal["tensor", "sparse_tensor", "sequence", "optional", "map", "unknown"] = "tensor"
    limits: tuple[tuple[int, int] | None, ...] = ()


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `name` is unique in the model; `domain` is ``""`` for the ONNX standard; `graph` is the path of the
    subgraph it is in, such as ``"loop/body"``, and ``""`` in the main graph; `kernels` is what the file asks for it;
    `result_of` the module whose result it makes, where its name says another one; `by_products`, for the softmax of an
    attention of PyTorch that is computed by products, is the width of a head, and 0 where that is not known.
    """  # noqa: D205

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: str = ""
    kernels: str = ""
    result_of: str = ""
    by_products: int | None = None


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is quantized."""

    scheme: Literal["none", "qdq", "qoperator", "dynamic", "weight_only"] = "none"
    activations: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()


# TensorProto.DataType to name.
_DTYPES = (
    "unknown", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "float64",
    "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2",
    "float8e5m2fnuz", "uint4", "int4", "float4e2m1", "float8e8m0", "uint2", "int2", "float6e2m3", "float6e3m2",
)  # fmt: skip


def dtype_name(elem_type: int) -> str:
    """Return the name of a TensorProto.DataType, such as ``"float32"``; ``"unknown"`` for one newer than this table."""
    return _DTYPES[elem_type] if 0 <= elem_type < len(_DTYPES) else "unknown"


#: What exporters write in place of the name of a dimension.
_NO_NAMES = frozenset({"", "?", "-1", "*", "none", "null"})


def tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    """Return name, dtype and shape of a graph's input or output."""
    kind = value.type.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        dtype, shape = _tensor(getattr(value.type, kind))
        return TensorInfo(name=value.name, dtype=dtype, shape=shape, kind=kind.removesuffix("_type"))
    inner = value.type
    while inner.WhichOneof("value") in ("sequence_type", "optional_type"):
        inner = getattr(inner, inner.WhichOneof("value")).elem_type
    dtype, shape = "unknown", None
    if inner.HasField("map_type"):
        inner = inner.map_type.value_type
    if inner.HasField("tensor_type"):
        dtype, shape = _tensor(inner.tensor_type)
    return TensorInfo(name=value.name, dtype=dtype, shape=shape, kind=kind.removesuffix("_type") if kind else "unknown")


def _tensor(proto: onnx.TypeProto.Tensor) -> tuple[str, tuple[int | str | None, ...] | None]:
    shape: tuple[int | str | None, ...] | None = None
    if proto.HasField("shape"):
        # Some exporters write a negative number, or a word, for a size that is not known.
        shape = tuple(
            (int(dim.dim_value) if dim.dim_value >= 0 else None)
            if dim.HasField("dim_value")
            else None
            if dim.dim_param.strip().lower() in _NO_NAMES
            else dim.dim_param
            for dim in proto.shape.dim
        )
    return dtype_name(proto.elem_type), shape


def weights(model: onnx.ModelProto) -> dict[str, int]:
    """Return the elements of all constant tensors by dtype, most first. Reads no data."""
    counts: Counter[str] = Counter()
    for tensor in tensors(model):
        counts[dtype_name(tensor.data_type)] += element_count(tensor.dims)
    return dict(counts.most_common())


# Integer operators and where their weights are.
_INTEGER_OPS = {"QLinearConv": 3, "QLinearMatMul": 3, "ConvInteger": 1, "MatMulInteger": 1}
_WEIGHT_OPS = {"MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized", "QMoE"}
#: Others that compute in integers, and others that quantize what they read.
_MORE_INTEGER_OPS = {"MatMulIntegerToFloat", "QAttention", "QGemm"}
_DYNAMIC_OPS = {"DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"}


def quantization(model: onnx.ModelProto) -> Quantization:
    """Return how the model is quantized, read from its operators and the types of their zero points."""
    ops: set[str] = set()
    activations: set[str] = set()
    stored: set[str] = set()
    for node, constants in _nodes_with_constants(model.graph, {}):
        ops.add(node.op_type)
        inputs: dict[int, str] = dict(enumerate(node.input))
        if node.op_type == "QuantizeLinear" and inputs.get(0, "") not in constants:
            activations.add(_zero_point(node, constants))
        elif node.op_type == "DequantizeLinear" and inputs.get(0, "") in constants:
            stored.add(dtype_name(constants[inputs[0]]))
        elif node.op_type == "DynamicQuantizeLinear":
            activations.add("uint8")
        elif node.op_type in _INTEGER_OPS:
            weight = inputs.get(_INTEGER_OPS[node.op_type], "")
            if weight in constants:
                stored.add(dtype_name(constants[weight]))
            if node.op_type.startswith("QLinear"):
                activations.add(_zero_point(node, constants))
    scheme: Literal["none", "qdq", "qoperator", "dynamic", "weight_only"] = "none"
    if ops & _DYNAMIC_OPS:
        scheme = "dynamic"
    elif ops & _MORE_INTEGER_OPS or any(op in _INTEGER_OPS or op.startswith("QLinear") for op in ops):
        scheme = "qoperator"
    elif activations:
        scheme = "qdq"
    elif stored or ops & _WEIGHT_OPS:
        scheme = "weight_only"
    return Quantization(scheme=scheme, activations=tuple(sorted(activations)), weights=tuple(sorted(stored)))


def _nodes_with_constants(
    graph: onnx.GraphProto, outer: Mapping[str, int]
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, int]]]:
    """Yield the nodes of a graph and of those inside, with the types of all constants that they can read."""
    constants = {**outer, **{tensor.name: tensor.data_type for tensor in graph.initializer}}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((name, a.t.data_type) for a in node.attribute if a.name == "value" for name in node.output)
    for node in graph.node:
        yield node, constants
        for _, inner in subgraphs(node):
            yield from _nodes_with_constants(inner, constants)


def _zero_point(node: onnx.NodeProto, constants: Mapping[str, int]) -> str:
    if len(node.input) > 2 and node.input[2] in constants:
        return dtype_name(constants[node.input[2]])
    dtype = next((a.i for a in node.attribute if a.name == "output_dtype"), 0)
    return dtype_name(dtype) if dtype else "uint8"


def random_outputs(model: onnx.ModelProto, places: Iterable[NamedNode]) -> dict[str, str]:
    """Return the outputs of a model that depend on random numbers, each with a node that draws them."""
    draws = _Draws(model)
    drawn: dict[str, str] = {}
    node = drawer = None
    for place in (*places, None):
        if place is not None and place.graph:
            drawer = drawer or (f"{place.name!r} ({place.node.op_type})" if draws(place.node) else None)
            continue
        if node is not None:  # its subgraphs are over
            if drawn and not drawer:
                drawer = next((drawn[name] for name in reads(node) if name in drawn), None)
            drawn.update(dict.fromkeys(filter(None, node.output), drawer) if drawer else {})
        if place is not None:
            node, drawer = place.node, f"{place.name!r} ({place.node.op_type})" if draws(place.node) else None
    return {value.name: drawn[value.name] for value in model.graph.output if value.name in drawn}


class _Draws:
    """Whether a node draws random numbers: by its operator, or as a call of a function of the model that does."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.functions: set[tuple[str, str]] = set()
        bodies = {
            (normal_domain(function.domain), function.name): list(_inner_nodes(function.node))
            for function in model.functions
        }
        while drawing := {key for key in bodies.keys() - self.functions if any(map(self, bodies[key]))}:
            self.functions |= drawing

    def __call__(self, node: onnx.NodeProto) -> bool:
        domain, op = normal_domain(node.domain), node.op_type
        if (domain, op) in self.functions or (not domain and op in RANDOM):
            return True
        if domain or op != "Dropout" or len(node.input) < 3 or not node.input[2]:
            return (domain, op) == ("com.microsoft", "Sampling")
        return not (self._is_zero(node.input[2]) or self._is_zero(node.input[1]))  # training_mode, ratio

    def _is_zero(self, name: str) -> bool:
        from onnx import numpy_helper

        stored = self.constants.get(name, [])
        try:
            return bool(stored) and not any(
                tensor.data_location or numpy_helper.to_array(tensor).any() for tensor in stored
            )
        except (KeyError, TypeError, ValueError):  # of a type that is none, or with other data than its shape needs
            return False

    @functools.cached_property
    def constants(self) -> dict[str, list[onnx.TensorProto]]:
        """Tensors by name; a name may stand for several, in functions and subgraphs."""
        stored = [(tensor.name, tensor) for graph in graphs(self.model) for tensor in graph.initializer]
        for graph in (*graphs(self.model), *self.model.functions):
            for node in graph.node:
                if node.op_type == "Constant":
                    stored += [
                        (node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value"
                    ]
        protos: dict[str, list[onnx.TensorProto]] = {}
        for name, tensor in stored:
            protos.setdefault(name, []).append(tensor)
        return protos


def _inner_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for _, graph in subgraphs(node):
            yield from _inner_nodes(graph.node)
