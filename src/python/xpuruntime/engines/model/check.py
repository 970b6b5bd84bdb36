# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Whether an ONNX graph is valid, with messages that name the node."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from xpuruntime.engines.model.external import is_external, nbytes
from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.model.graph import graphs, normal_domain, sort_nodes, subgraphs, tensors
from xpuruntime.engines.model.limits import shown_dims

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import onnx

__all__ = ["check_graph", "check_text", "complaint", "complaint_about"]

#: Operators that ONNX Runtime registers in the default domain although ONNX does not (any opset before the one given).
_ENGINE_OPS = {"SimplifiedLayerNormalization": 1 << 30, "LayerNormalization": 17}

_FOREIGN = "xpuruntime.foreign"

# Tensors of more bytes than this are checked here, and left out of what the ONNX checker is given.
_LARGE = 64 * 1024


def check_text(model: onnx.ModelProto, where: str) -> None:
    """Check that every name is UTF-8; protobuf hands out bytes where one is not.

    Raises
    ------
    ModelError
        One is not.
    """
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
    _check_versions(model, where)
    _check_single_assignment(model.graph, where)
    resorted = sort_nodes(model.graph)
    custom = _check_ops(model, where)
    for tensor in tensors(model):
        _check_data(tensor, where)
    reason = complaint(model)
    if reason is not None:
        raise refuse(where, f"the graph is invalid: {reason}", "mend the exporter, or export the model again")
    return custom, resorted


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

    The checker is stricter than engines in two points, which are hidden from it: an operator that an engine adds to
    the default domain, and an input or output without a rank.
    """
    import onnx

    versions = {normal_domain(o.domain): o.version for o in model.opset_import}
    added = [(n, n.domain) for g in graphs(model) for n in g.node if _is_engine_op(n, versions)]
    unranked = [
        value.type.tensor_type
        for graph in graphs(model)
        for value in (*graph.input, *graph.output)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    ]
    try:
        for node, _ in added:
            node.domain = _FOREIGN
        if added:
            model.opset_import.append(onnx.helper.make_opsetid(_FOREIGN, 1))
        for kind in unranked:
            kind.shape.SetInParent()
        onnx.checker.check_model(model.SerializeToString())
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split()).rstrip(".")
    finally:
        for node, domain in added:
            node.domain = domain
        if added:
            model.opset_import.pop()
        for kind in unranked:
            kind.ClearField("shape")
    return None


def _is_engine_op(node: onnx.NodeProto, versions: dict[str, int]) -> bool:
    if node.op_type not in _ENGINE_OPS or normal_domain(node.domain) != "":
        return False
    return versions.get("", 1 << 30) < _ENGINE_OPS[node.op_type]


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


def _check_ops(model: onnx.ModelProto, where: str) -> dict[str, tuple[str, ...]]:
    """Return the operators outside the standard, by domain."""
    versions = {normal_domain(o.domain): o.version for o in model.opset_import}
    functions = {(normal_domain(f.domain), f.name) for f in model.functions}
    official = {"", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "ai.onnx.preview"}
    custom: dict[str, set[str]] = {}
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
            if _is_engine_op(node, versions):
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
    return {domain: tuple(sorted(ops)) for domain, ops in sorted(custom.items())}


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
    if is_external(tensor):  # checked before, against the right folder
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        _empty(tensor)
        return
    if needed is None or not tensor.HasField("raw_data"):
        return
    size = len(tensor.raw_data)
    if size != needed:
        import onnx

        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        raise refuse(
            where,
            f"tensor {tensor.name!r} ({kind}{shown_dims(tensor.dims)}) holds {size} bytes, and needs {needed}",
            "copy, download or export the model again",
        )
    if size > _LARGE:
        _empty(tensor)


def _empty(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = b""
    tensor.dims[:] = [0]
