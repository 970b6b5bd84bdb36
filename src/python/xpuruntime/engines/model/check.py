# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Validity of an ONNX graph, with messages that name the node."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.model.external import element_count, is_external, nbytes, shown_dims
from xpuruntime.engines.model.file import onnx_checks, onnx_messages, refuse
from xpuruntime.engines.model.graph import graphs, normal_domain, sort_nodes, subgraphs, tensors
from xpuruntime.policies.document import nearest, question
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    import onnx

_NEVER = 1 << 30
#: Operators that ONNX Runtime registers in the default domain although ONNX does not (any opset before the one given).
_ENGINE_OPS = {
    "Affine": _NEVER,
    "Crop": _NEVER,
    "DynamicSlice": _NEVER,
    "GivenTensorFill": _NEVER,
    "ImageScaler": _NEVER,
    "LayerNormalization": 17,
    "MeanVarianceNormalization": 9,
    "ParametricSoftplus": _NEVER,
    "Scale": _NEVER,
    "ScaledTanh": _NEVER,
    "SimplifiedLayerNormalization": _NEVER,
    "ThresholdedRelu": 10,
}

_FOREIGN = "xpuruntime.foreign"
#: Fields of a tensor that hold its data by type.
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
#: Types with several elements in one value of such a field, and with one in two.
_PACKED, _COMPLEX = frozenset({21, 22, 23, 25, 26}), frozenset({14, 15})
_OFFICIAL = frozenset({"", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "ai.onnx.preview"})
#: Signs of what no engine runs in a text of the ONNX checker: a node against its schema, reading what is missing, a
#: tensor without its data.
_FATAL = (
    "Bad node spec", "topologically sorted", "single static assignment", "ir_version", "opset_import", "data_type",
    "TensorProto (", "tensor name:",
)  # fmt: skip

# Tensors of more bytes than this are checked here, and left out of what the ONNX checker is given.
_LARGE = 64 * 1024


def check_text(model: onnx.ModelProto, where: str) -> None:
    """Check that every name is UTF-8; protobuf hands out bytes where one is not."""
    broken = next((text for text in _texts(model) if isinstance(text, bytes)), None)
    if broken is not None:
        raise refuse(where, f"it is corrupt: the name {broken!r} is not UTF-8", "copy, download or export it again")


def _texts(model: onnx.ModelProto) -> Iterator[object]:
    yield from (model.producer_name, model.producer_version, model.graph.name)
    yield from (opset.domain for opset in model.opset_import)
    yield from (text for entry in model.metadata_props for text in (entry.key, entry.value))
    for tensor in tensors(model):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    for graph in graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
        yield from _node_texts(graph.node)
    for function in model.functions:
        yield from (function.name, function.domain)
        yield from _node_texts(function.node)


def _node_texts(nodes: Iterable[onnx.NodeProto]) -> Iterator[object]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (text for entry in node.metadata_props for text in (entry.key, entry.value))
        yield from (attribute.name for attribute in node.attribute)


class Checked(msgspec.Struct, frozen=True):
    """What a check of a graph found; `deferred` where nodes were not compared with their schemas."""

    custom: dict[str, tuple[str, ...]]
    unknown: dict[str, str]
    resorted: bool
    notes: tuple[str, ...]
    deferred: bool = False


def check_graph(model: onnx.ModelProto, where: str, *, defer: bool = False) -> Checked:
    """Check a parsed model. The model is changed: large tensors are emptied, nodes may be sorted.

    Refused is only what no engine runs; anything else that the ONNX checker has against the model is a note. With
    `defer` the nodes of a plain model are not compared with their schemas, whose registry takes longer than all else.
    """
    notes: list[str] = []
    plain = defer and _is_plain(model)
    if not plain:
        _check_versions(model, where)
    _check_single_assignment(model.graph, where, notes)
    resorted = sort_nodes(model.graph)
    custom, unknown = ({}, {}) if plain else _check_ops(model)
    for tensor in tensors(model):
        _check_data(tensor, where)
    if plain:
        return Checked(custom, unknown, resorted, (), deferred=True)
    allowed, small = _allowed(model)
    reason = _asked(allowed)
    if reason is not None and any(sign in reason for sign in _FATAL):
        raise refuse(where, f"the graph is invalid: {reason}", "correct the exporter, or export the model again")
    notes += small
    if reason is not None:
        notes.append(f"the ONNX checker refuses it: {reason}")
    return Checked(custom, unknown, resorted, tuple(notes))


#: IR versions and opsets that each supported onnx knows, the oldest of which is 1.17.
_PLAIN_IR, _PLAIN_OPSETS = range(4, 11), range(1, 23)
#: Types whose values each supported onnx takes as raw data, and the fields that hold values of one type.
_PLAIN_TYPES, _PLAIN_FIELDS = frozenset(range(1, 17)) - {8}, {"float_data": 1, "int32_data": 6, "int64_data": 7}


def _is_plain(model: onnx.ModelProto) -> bool:
    """Whether the ONNX checker can have nothing against a model but a node that its schema does not allow."""
    # ONNX Runtime compares nodes with the same schemas when it loads a model, all but those of constants.
    graph = model.graph
    values = (*graph.input, *graph.output)
    return (
        model.ir_version in _PLAIN_IR
        and not (model.functions or model.training_info or graph.sparse_initializer)
        and [o.version in _PLAIN_OPSETS for o in model.opset_import if not normal_domain(o.domain)] == [True]
        and all(0 <= opset.version <= _NEVER for opset in model.opset_import)
        and bool(graph.name)
        and _are_distinct(entry.key for entry in model.metadata_props)
        and _are_distinct(tensor.name for tensor in graph.initializer)
        and _are_distinct(value.name for value in graph.input)
        and _are_distinct(value.name for value in graph.output)
        and all(value.name and value.type.tensor_type.elem_type for value in values)
        and all(tensor.name and _is_plain_tensor(tensor) for tensor in graph.initializer)
        and all(map(_is_plain_node, graph.node))
    )


def _are_distinct(names: Iterable[str]) -> bool:
    listed = [*names]
    return len(set(listed)) == len(listed)


def _is_plain_tensor(tensor: onnx.TensorProto) -> bool:
    if tensor.HasField("segment"):
        return False
    filled = [field for field in _TYPED if len(getattr(tensor, field))]
    if is_external(tensor) or tensor.HasField("raw_data"):
        return tensor.data_type in _PLAIN_TYPES and not filled
    return len(filled) == 1 and _PLAIN_FIELDS.get(filled[0]) == tensor.data_type


def _is_plain_node(node: onnx.NodeProto) -> bool:
    if normal_domain(node.domain) or not node.op_type or node.op_type in _ENGINE_OPS:
        return False
    held = node.attribute
    if node.op_type == "Constant":
        return [a.name for a in held] == ["value"] and held[0].type == 4 and _is_plain_tensor(held[0].t)
    return not any(attribute.ref_attr_name or attribute.type in _WITH_PARTS for attribute in held)


#: Types of attributes that hold graphs, tensors and types.
_WITH_PARTS = frozenset({4, 5, 9, 10, 11, 12, 13, 14})


def complaint_about(model: onnx.ModelProto) -> str | None:
    """Return what the ONNX checker has against a model with all its weights, which are as before afterwards."""
    held: list[tuple[onnx.TensorProto, list[int], bytes]] = []
    try:
        for tensor in tensors(model):
            if (nbytes(tensor) or 0) > _LARGE and tensor.HasField("raw_data"):
                held.append((tensor, list(tensor.dims), tensor.raw_data))
                tensor.raw_data = b""
                tensor.dims[:] = [0]
        return complaint(model)
    finally:
        for tensor, dims, data in held:
            tensor.dims[:] = dims
            tensor.raw_data = data


def complaint(model: onnx.ModelProto) -> str | None:
    """Return what the ONNX checker has against a model without large or external weights; None when nothing.

    Points in which it is stricter than engines are hidden from it, such as an operator that an engine adds to the
    default domain, or an output without a type.
    """
    return _asked(_allowed(model)[0])


def _asked(model: onnx.ModelProto) -> str | None:
    checker = onnx_checks().checker
    try:
        checker.check_model(model.SerializeToString(), False, False, False)  # as onnx.checker does by default
    except (checker.ValidationError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return None


def _allowed(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return a copy in which what engines run is as the ONNX checker wants it, and notes on that."""
    messages = onnx_messages()
    copy = messages.ModelProto()
    copy.CopyFrom(model)
    notes = []
    if copy.ir_version < 4 and copy.HasField("ir_version"):
        listed = {value.name for value in copy.graph.input}
        apart = [tensor.name for tensor in copy.graph.initializer if tensor.name not in listed]
        if apart:
            notes.append(f"weights such as {apart[0]!r} are not among the inputs, which IR version 3 asks for")
            copy.ir_version = 4
    keys = [entry.key for entry in copy.metadata_props]
    if len(set(keys)) < len(keys):
        notes.append("the metadata has one key twice")
        del copy.metadata_props[:]
    if not copy.graph.name:
        notes.append("the graph has no name")
        copy.graph.name = "graph"
    _known_domains(copy, notes)
    for tensor in tensors(copy):
        if tensor.HasField("raw_data") and any(len(getattr(tensor, field)) for field in _TYPED):
            notes.append(f"tensor {tensor.name!r} has its data twice; engines take the raw data")
            for field in _TYPED:
                tensor.ClearField(field)
    for graph in graphs(copy):
        seen: set[str] = set()
        for index in reversed(range(len(graph.initializer))):  # the last of one name counts
            name = graph.initializer[index].name
            if name in seen:
                del graph.initializer[index]
            seen.add(name)
        for value in (*graph.input, *graph.output):
            if not value.type.WhichOneof("value"):
                notes.append(f"{value.name!r} has no type")
                value.type.tensor_type.elem_type = messages.TensorProto.FLOAT
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.shape.SetInParent()
    return copy, notes


def _known_domains(model: onnx.ModelProto, notes: list[str]) -> None:
    """Give operators that ONNX has no schema of a domain that the checker does not look into."""
    for opset in model.opset_import:
        opset.domain = normal_domain(opset.domain)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    functions = {(normal_domain(f.domain), f.name) for f in model.functions}
    missing: set[str] = set()
    for graph in graphs(model):
        for node in graph.node:
            node.domain = normal_domain(node.domain)
            version = versions.get(node.domain)
            if version is None and node.domain:
                missing.add(node.domain)
            known = version is not None or not node.domain
            if (node.domain, node.op_type) in functions and known:
                continue
            if not known or _is_engine_op(node, versions) or _unknown(node.op_type, node.domain, version) is not None:
                node.domain = _FOREIGN
    notes += [f"the domain {domain!r} is used and not imported" for domain in sorted(missing)]
    model.opset_import.add(domain=_FOREIGN, version=1)


def _is_engine_op(node: onnx.NodeProto, versions: dict[str, int]) -> bool:
    if node.op_type not in _ENGINE_OPS or normal_domain(node.domain) != "":
        return False
    return versions.get("", 1 << 30) < _ENGINE_OPS[node.op_type]


def _check_versions(model: onnx.ModelProto, where: str) -> None:
    newest = onnx_messages().IR_VERSION
    if model.ir_version > newest:
        raise refuse(
            where,
            f"its IR version is {model.ir_version}, and onnx {installed('onnx')['onnx']} knows up to {newest}",
            "upgrade with `pip install -U onnx`, or save the model with an older ir_version",
        )
    known = onnx_checks().defs.schema_version_map()[""][1]
    for opset in model.opset_import:
        if not 0 <= opset.version <= _NEVER:
            raise refuse(
                where, f"its opset {opset.version} of {opset.domain!r} is no version", "export the model again"
            )
        if normal_domain(opset.domain) == "" and not 1 <= opset.version <= known:
            raise refuse(
                where,
                f"it uses opset {opset.version}, and onnx {installed('onnx')['onnx']} knows 1 to {known}",
                "upgrade with `pip install -U onnx`, or convert it with onnx.version_converter.convert_version",
            )


def _check_ops(model: onnx.ModelProto) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the operators outside the standard by domain, and those that its domains have not, with the reason."""
    versions = {normal_domain(o.domain): o.version for o in model.opset_import}
    functions = {(normal_domain(f.domain), f.name) for f in model.functions}
    custom: dict[str, set[str]] = {}
    unknown: dict[str, str] = {}
    judged: dict[tuple[str, str], str | None] = {}
    for graph in graphs(model):
        for node in graph.node:
            key = (normal_domain(node.domain), node.op_type)
            domain, op = key
            if key in functions:
                continue
            if domain not in _OFFICIAL or _is_engine_op(node, versions):
                custom.setdefault(domain, set()).add(op)
                continue
            if key not in judged:
                judged[key] = _unknown(op, domain, versions.get(domain))
            if judged[key] is not None:
                custom.setdefault(domain, set()).add(op)
                unknown.setdefault(
                    f"{domain or 'ai.onnx'}:{op}", f"{judged[key]}, at node {node.name or '(unnamed)'!r}"
                )
    return {domain: tuple(sorted(ops)) for domain, ops in sorted(custom.items())}, dict(sorted(unknown.items()))


@functools.lru_cache(maxsize=4096)
def _unknown(op: str, domain: str, version: int | None) -> str | None:
    """Return why the standard has no such operator at this version; None when it has, or it is not of the standard."""
    if domain not in _OFFICIAL or version is None:
        return None
    defs = onnx_checks().defs
    if defs.has_schema(op, max_inclusive_version=version, domain=domain):
        return None
    schemas = [s for s in defs.get_all_schemas_with_history() if s.domain == domain]
    since = [s.since_version for s in schemas if s.name == op]
    if since:
        return f"first in opset {min(since)}, and the model imports {version}"
    return f"not in opset {version}{question(nearest(op, sorted({s.name for s in schemas})))}"


def _check_single_assignment(graph: onnx.GraphProto, where: str, notes: list[str], outer: str = "") -> None:
    makers: dict[str, str] = {value.name: "a graph input" for value in graph.input}
    for tensor in graph.initializer:
        if makers.get(tensor.name) == "an initializer":
            notes.append(f"tensor {tensor.name!r} is defined by two initializers{outer}; engines take the last")
        makers[tensor.name] = "an initializer"
    for node in graph.node:
        maker = f"node {node.name!r} ({node.op_type})" if node.name else f"a {node.op_type} node"
        for output in node.output:
            if not output:
                continue
            if output in makers:
                raise refuse(
                    where,
                    f"tensor {output!r} is made twice{outer}, by {makers[output]} and by {maker}",
                    "rename one of the two",
                )
            makers[output] = maker
        for name, inner in subgraphs(node):
            _check_single_assignment(inner, where, notes, f" in {name!r} of {maker}")


def _check_data(tensor: onnx.TensorProto, where: str) -> None:
    """Check that the data fits type and dims; empty a large tensor, as the checker would only copy it."""
    needed = nbytes(tensor)
    if is_external(tensor):  # checked before, against the right folder
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        _empty(tensor)
        return
    if needed is None:
        return
    if not tensor.HasField("raw_data"):
        _check_values(tensor, where)
        return
    size = len(tensor.raw_data)
    if size != needed:
        kind = onnx_messages().TensorProto.DataType.Name(tensor.data_type).lower()
        raise refuse(
            where,
            f"tensor {tensor.name!r} ({kind}{shown_dims(tensor.dims)}) holds {size} bytes, and needs {needed}",
            "copy, download or export the model again",
        )
    if size > _LARGE:
        _empty(tensor)


def _check_values(tensor: onnx.TensorProto, where: str) -> None:
    many = next((len(getattr(tensor, field)) for field in _TYPED if len(getattr(tensor, field))), 0)
    if not many or tensor.data_type in _PACKED:
        return
    count = element_count(tensor.dims) * (2 if tensor.data_type in _COMPLEX else 1)
    if many != count:
        raise refuse(
            where,
            f"tensor {tensor.name!r} of shape {shown_dims(tensor.dims)} holds {many} values, and needs {count}",
            "copy, download or export the model again",
        )


def _empty(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = b""
    tensor.dims[:] = [0]
