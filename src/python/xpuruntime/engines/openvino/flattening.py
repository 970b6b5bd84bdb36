# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Softmax of ONNX opsets 11 and 12, which is defined over all axes from its own on, in OpenVINO's graph.

OpenVINO's reader makes of it a Softmax over one axis (https://github.com/openvinotoolkit/openvino/issues/37823), so
that is computed on a matrix instead. Nodes of subgraphs are left alone: plans name them as known errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

__all__ = ["flatten_softmax"]

_OPSETS = (11, 12)


def flatten_softmax(graph: Any, info: ModelInfo) -> list[str]:
    """Replace every such Softmax of an ``openvino.Model``, in place. Return the source nodes by name."""
    if info.opsets.get("", 0) not in _OPSETS or "Softmax" not in info.ops:
        return []
    makers = {node.outputs[0]: node.name for node in info.nodes if node.op == "Softmax" and not node.graph}
    done = []
    for operation in list(graph.get_ordered_ops()):
        if operation.get_type_name() != "Softmax":
            continue
        source = next((makers[name] for name in operation.output(0).get_names() if name in makers), None)
        rank = operation.input_value(0).get_partial_shape().rank
        if source is None or rank.is_dynamic or len(rank) < 3:
            continue
        axis = int(operation.get_attributes()["axis"]) % len(rank)
        if axis != len(rank) - 1:
            _replace(operation, axis)
            done.append(source)
    return done


def _replace(operation: Any, axis: int) -> None:
    import numpy as np
    from openvino import opset8 as opset

    data = operation.input_value(0)
    shape, rows = opset.shape_of(data, "i64"), opset.constant(np.array([1], np.int64))
    if axis:
        zero = opset.constant(np.int64(0))
        leading = opset.gather(shape, opset.constant(np.arange(axis, dtype=np.int64)), zero)
        rows = opset.reduce_prod(leading, zero, keep_dims=True)
    matrix = opset.reshape(data, opset.concat([rows, opset.constant(np.array([-1], np.int64))], 0), False)
    result = opset.reshape(opset.softmax(matrix, 1), shape, False)
    old = operation.output(0)
    readers, names = list(old.get_target_inputs()), set(old.get_names())
    old.get_tensor().set_names(set())
    result.output(0).get_tensor().set_names(names)
    result.set_friendly_name(operation.get_friendly_name())
    for reader in readers:
        reader.replace_source_output(result.output(0))
