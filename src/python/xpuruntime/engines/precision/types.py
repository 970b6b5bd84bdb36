# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of precisions, and element types of every value in a graph, from the operators' own signatures.

ONNX shape inference stops at operators outside the standard, copies all weights, and ends at 2 GiB. Types alone need
none of that: an operator's signature says which inputs and outputs share a type.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.external import inline_functions
from xpuruntime.engines.model.graph import graphs, inferred, normal_domain, subgraphs

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo

#: Precisions that are floating point.
FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8"})
#: By name of an element type: the name in reports, and ONNX's where that is another.
_PRECISIONS_OF = {
    "double": "fp64",
    "float64": "fp64",
    "float": "fp32",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4m3fn": "fp8",
    "float8e4m3fnuz": "fp8",
    "float8e5m2": "fp8",
    "float8e5m2fnuz": "fp8",
}


def precision_name(dtype: str) -> str:
    """Return the precision of an element type: ``"fp16"`` for ``"float16"``. Integers keep their names."""
    return _PRECISIONS_OF.get(dtype, dtype)


def read_and_written(read: str | None, written: str | None) -> str | None:
    """Return one precision for what is read and what is written, ``"fp32->uint8"`` where these differ."""
    if read is None or written is None or read == written:
        return written or read
    return f"{read}->{written}"


def main_precision(tensors: Iterable[tuple[str | None, int]]) -> str | None:
    """Return the precision that counts among several tensors, given as precision and number of elements.

    It is that of the largest one, and of equally large ones a floating-point one: neither the scales of a quantized
    operator nor the condition of a Where say in what precision it computes. ``None`` where none is known.
    """
    known = [(elements, name in FLOATS, name) for name, elements in tensors if name is not None]
    return max(known, key=lambda entry: entry[:2])[2] if known else None


def meets(wanted: str | None, ran: str) -> bool:
    """Say whether what ran is the precision asked for; int8 is met by 8 bits with and without a sign."""
    parts = ran.split("->")
    return wanted is None or wanted in parts or (wanted == "int8" and "uint8" in parts)


def precision_of(data_type: int) -> str:
    """Return the precision of a ``TensorProto.DataType``; empty for a number that ONNX does not define."""
    import onnx

    kinds = onnx.TensorProto.DataType
    return precision_name(kinds.Name(data_type).lower()) if data_type in kinds.values() else ""


def model_precisions(model: onnx.ModelProto, stated: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return tensor to precision for the outermost graph; `stated` are types that are known and not inferred."""
    return _precisions([inferred(model).graph], stated or {})


def _precisions(known: Iterable[onnx.GraphProto], stated: Mapping[str, int]) -> dict[str, str]:
    types = dict(stated)
    for graph in known:
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
                types.setdefault(value.name, value.type.tensor_type.elem_type)
        for tensor in graph.initializer:
            types.setdefault(tensor.name, tensor.data_type)
    names = {t: precision_of(t) for t in set(types.values())}
    return {k: names[t] for k, t in types.items()}


#: Attributes that state the type of what a node makes.
_STATES = ("to", "dtype")
_NAMED = 4


def other_floats(model: ModelInfo, precisions: Collection[str], *, casts: bool = False) -> str:
    """Return the nodes that read or make tensors of some precisions, in a line; or nothing.

    Casts are named only with `casts`, and but for those of constants.
    """
    proto = model.named_proto() if model.format == "onnx" else None
    if proto is not None and proto.functions:
        proto = inline_functions(proto, model.path)
    if proto is None or not _stated(model, proto) & set(precisions):
        return ""
    known = list(graphs(inferred(proto)))
    types = _precisions(known, {})
    made = {name for graph in known for node in graph.node if node.op_type != "Constant" for name in node.output}
    read = made | {value.name for value in proto.graph.input}
    named = []
    for node in (node for graph in known for node in graph.node):
        those = {types.get(name, "") for name in (*node.input, *node.output)} & set(precisions)
        left_out = node.op_type == "Constant" or (node.op_type == "Cast" and not (casts and node.input[0] in read))
        if those and not left_out:
            named.append(f"{node.name!r} ({node.op_type}, {', '.join(sorted(those))})")
    rest = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + rest


def _stated(model: ModelInfo, proto: onnx.ModelProto) -> set[str]:
    words = {input_.dtype for input_ in (*model.inputs, *model.outputs)} | set(model.weights)
    numbers = {tensor.data_type for graph in graphs(proto) for tensor in graph.initializer}
    for graph in graphs(proto):
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in _STATES:
                    numbers.add(int(attribute.i))
                elif attribute.HasField("t"):
                    numbers.add(int(attribute.t.data_type))
    return {precision_name(word) for word in words} | {precision_of(number) for number in numbers}


UNKNOWN, FLOAT, FLOAT16, BFLOAT16 = 0, 1, 10, 16
#: A sequence, map or optional.
NO_TENSOR = -1

_NAMES = {FLOAT: "tensor(float)", FLOAT16: "tensor(float16)", BFLOAT16: "tensor(bfloat16)"}

#: Operators whose output type is the value of an attribute: op to (attribute, type without it).
_BY_ATTRIBUTE = {
    "Cast": ("to", UNKNOWN),
    "RandomNormal": ("dtype", FLOAT),
    "RandomUniform": ("dtype", FLOAT),
    "QuantizeLinear": ("output_dtype", UNKNOWN),
    "BlackmanWindow": ("output_datatype", FLOAT),
    "HammingWindow": ("output_datatype", FLOAT),
    "HannWindow": ("output_datatype", FLOAT),
    "MelWeightMatrix": ("output_datatype", FLOAT),
    "BitCast": ("to", UNKNOWN),
}
#: Operators whose output type is an attribute's value, and without it that of the first input.
_LIKE_INPUT = {"EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli"}


class NodeTypes(NamedTuple):
    """TensorProto.DataType of each input and output of a node; 0 unknown or left out, -1 no tensor."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Signature(NamedTuple):
    """Type variables of an operator: one name an input and output, and the types each variable allows.

    The last name stands for all further inputs or outputs when the operator takes any number of them.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: Mapping[str, frozenset[str]]
    since: int

    def input(self, index: int) -> str:
        """Return the type variable (or fixed type) of an input."""
        return self.inputs[min(index, len(self.inputs) - 1)] if self.inputs else ""

    def output(self, index: int) -> str:
        """Return the type variable (or fixed type) of an output."""
        return self.outputs[min(index, len(self.outputs) - 1)] if self.outputs else ""

    def allows(self, variable: str, elem_type: int) -> bool:
        """Return whether a variable may be `elem_type`; a fixed type allows itself."""
        name = signature_type(elem_type)
        return name == variable or name in self.allowed.get(variable, ())


def signature_type(elem_type: int) -> str:
    """Return the name that ONNX signatures use, such as ``"tensor(float)"``."""
    import onnx

    if elem_type in _NAMES:
        return _NAMES[elem_type]
    if elem_type == 11:
        return "tensor(double)"
    return f"tensor({onnx.TensorProto.DataType.Name(elem_type).lower()})"


@functools.lru_cache(maxsize=4096)
def signature(op: str, domain: str, version: int) -> Signature | None:
    """Return an operator's signature: from ONNX, else from an engine's own operators; None when neither has it."""
    from onnx import defs

    if defs.has(op, max_inclusive_version=version, domain=domain):
        schema = defs.get_schema(op, version, domain)
        return Signature(
            tuple(i.type_str for i in schema.inputs),
            tuple(o.type_str for o in schema.outputs),
            {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints},
            schema.since_version,
        )
    return _engine_signatures().get((domain, op))


@functools.lru_cache(maxsize=1)
def _engine_signatures() -> dict[tuple[str, str], Signature]:
    from xpuruntime.engines.registry import default_registry

    signatures: dict[tuple[str, str], Signature] = {}
    for schema in (schema for engine in default_registry() for schema in engine.operator_schemas()):
        key = (normal_domain(schema.domain), schema.name)
        if key in signatures and signatures[key].since > schema.since_version:
            continue
        signatures[key] = Signature(
            tuple(i.typeStr for i in schema.inputs),
            tuple(o.typeStr for o in schema.outputs),
            {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints},
            schema.since_version,
        )
    return signatures


def node_types(model: onnx.ModelProto) -> dict[str, NodeTypes]:
    """Return the types of every node's inputs and outputs, subgraphs included, by (unique) node name."""
    versions = {normal_domain(o.domain): o.version for o in model.opset_import}
    types: dict[str, NodeTypes] = {}
    _walk(model.graph, {}, versions, types)
    return types


def _value_type(value: onnx.ValueInfoProto) -> int:
    if value.type.HasField("tensor_type"):
        return int(value.type.tensor_type.elem_type)
    return UNKNOWN if value.type.WhichOneof("value") is None else NO_TENSOR


def _walk(
    graph: onnx.GraphProto, outer: Mapping[str, int], versions: Mapping[str, int], node_types: dict[str, NodeTypes]
) -> tuple[int, ...]:
    """Fill `found` for one graph; return the types of its outputs."""
    types = dict(outer)
    for value in (*graph.value_info, *graph.output, *graph.input):
        types[value.name] = _value_type(value)
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    types.update((sparse.values.name, sparse.values.data_type) for sparse in graph.sparse_initializer)
    for node in graph.node:
        inner = [_walk(sub, types, versions, node_types) for _, sub in subgraphs(node)]
        domain = normal_domain(node.domain)
        form = signature(node.op_type, domain, versions.get(domain, 1))
        inputs = [types.get(name, UNKNOWN) if name else UNKNOWN for name in node.input]
        bound = _bind(form, inputs)
        if form is not None:  # inputs that share a variable share its type
            for i, name in enumerate(node.input):
                if name and inputs[i] == UNKNOWN and form.input(i) in bound and not inner:
                    inputs[i] = types[name] = bound[form.input(i)]
        outputs = _outputs(node, form, inputs, bound, inner)
        for i, name in enumerate(node.output):
            if name:
                types[name] = outputs[i] = outputs[i] or types.get(name, UNKNOWN)
        node_types[node.name] = NodeTypes(tuple(inputs), tuple(outputs))
    return tuple(types.get(value.name, UNKNOWN) for value in graph.output)


def _bind(form: Signature | None, inputs: Iterable[int]) -> dict[str, int]:
    bound: dict[str, int] = {}
    if form is not None:
        for i, elem_type in enumerate(inputs):
            if elem_type != UNKNOWN:
                bound.setdefault(form.input(i), elem_type)
    return bound


def _outputs(
    node: onnx.NodeProto,
    form: Signature | None,
    inputs: list[int],
    bound: Mapping[str, int],
    inner: list[tuple[int, ...]],
) -> list[int]:
    count = len(node.output)
    attributes = {a.name: a for a in node.attribute}
    op = node.op_type if normal_domain(node.domain) == "" else ""
    if inner:
        skip = {"If": 0, "Scan": 0, "Loop": 1}.get(op)
        if skip is None:
            return [UNKNOWN] * count
        types = list(inner[0][skip:])
        return (types + [UNKNOWN] * count)[:count]
    if op == "Constant":
        return [_constant_type(attributes)] * count
    if op == "ConstantOfShape":
        return [attributes["value"].t.data_type if "value" in attributes else FLOAT] * count
    if op in _BY_ATTRIBUTE:
        name, default = _BY_ATTRIBUTE[op]
        if name in attributes and attributes[name].i:
            return [int(attributes[name].i)] * count
        if default:
            return [default] * count
    if op in _LIKE_INPUT:
        return [int(attributes["dtype"].i) if "dtype" in attributes else inputs[0]] * count
    if form is None:
        return [UNKNOWN] * count
    return [_one_output(form, form.output(i), bound) for i in range(count)]


def _one_output(form: Signature, variable: str, bound: Mapping[str, int]) -> int:
    if variable in bound:
        return bound[variable]
    allowed = form.allowed.get(variable, frozenset({variable}))
    if not any(name.startswith(("tensor(", "sparse_tensor(")) for name in allowed):
        return NO_TENSOR
    if len(allowed) != 1:
        return UNKNOWN
    return _fixed_types().get(next(iter(allowed)), UNKNOWN)


@functools.lru_cache(maxsize=1)
def _fixed_types() -> dict[str, int]:
    import onnx

    return {signature_type(number): number for number in onnx.TensorProto.DataType.values() if number}


def _constant_type(attributes: Mapping[str, Any]) -> int:
    if "value" in attributes:
        return int(attributes["value"].t.data_type)
    if "sparse_value" in attributes:
        return int(attributes["sparse_value"].sparse_tensor.values.data_type)
    for name, elem_type in (("value_float", 1), ("value_floats", 1), ("value_int", 7), ("value_ints", 7)):
        if name in attributes:
            return elem_type
    return 8
