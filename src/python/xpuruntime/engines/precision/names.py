# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of precisions and element types, and what a model states of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from xpuruntime.engines.model.external import inline_functions
from xpuruntime.engines.model.graph import graphs, inferred

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo

#: Precisions that are floating point.
FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8"})
#: By name of an element type: the name in reports, and ONNX's where that is another.
_NAMES = {
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
    return _NAMES.get(dtype, dtype)


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
