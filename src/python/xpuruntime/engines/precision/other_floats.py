# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`other_floats`: the nodes of a model that compute in a floating-point type which the model itself states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.model.graph import graphs
from xpuruntime.engines.precision.names import precision_name
from xpuruntime.engines.precision.stated import model_precisions, precision_of

if TYPE_CHECKING:
    from collections.abc import Collection

    import onnx

    from xpuruntime.engines.model import ModelInfo

__all__ = ["other_floats"]

#: Attributes that state the type of what a node makes.
_STATES = ("to", "dtype")
_NAMED = 4


def other_floats(model: ModelInfo, precisions: Collection[str]) -> str:
    """Return the nodes of the outermost graph that read or make tensors of some precisions, in a line; or nothing."""
    proto = model.named_proto() if model.format == "onnx" else None
    if proto is None or not _stated(model, proto) & set(precisions):
        return ""
    stated = {one.name: one.data_type for one in proto.graph.initializer}
    types = model_precisions(proto, stated | {one.name: one.type.tensor_type.elem_type for one in proto.graph.input})
    found = []
    for node in proto.graph.node:
        those = {types.get(name, "") for name in (*node.input, *node.output)} & set(precisions)
        if those and node.op_type not in ("Cast", "Constant"):
            found.append(f"{node.name!r} ({node.op_type}, {', '.join(sorted(those))})")
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _stated(model: ModelInfo, proto: onnx.ModelProto) -> set[str]:
    words = {input_.dtype for input_ in (*model.inputs, *model.outputs)} | set(model.weights)
    numbers = {one.data_type for graph in graphs(proto) for one in graph.initializer}
    for graph in graphs(proto):
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in _STATES:
                    numbers.add(int(attribute.i))
                elif attribute.HasField("t"):
                    numbers.add(int(attribute.t.data_type))
    return {precision_name(word) for word in words} | {precision_of(number) for number in numbers}
