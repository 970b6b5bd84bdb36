# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`model_precisions`: the precision of every tensor of a model, as the model states or implies it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.model.graph import without_weights
from xpuruntime.engines.precision.names import precision_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

__all__ = ["model_precisions", "precision_of"]


def precision_of(data_type: int) -> str:
    """Return the precision of a ``TensorProto.DataType``; empty for a number that ONNX does not define."""
    import onnx

    kinds = onnx.TensorProto.DataType
    return precision_name(kinds.Name(data_type).lower()) if data_type in kinds.values() else ""


def model_precisions(model: onnx.ModelProto, stated: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return tensor to precision for the outermost graph.

    Types are inferred on a copy without weights; where that fails, only stated ones are returned.
    """
    import onnx

    types = dict(stated or {})
    light = without_weights(model)
    light.graph.node.extend(model.graph.node)
    light.graph.value_info.extend(model.graph.value_info)
    try:
        inferred = onnx.shape_inference.infer_shapes(light, check_type=False, strict_mode=False, data_prop=False)
    except (RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError):
        inferred = light
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
            types.setdefault(value.name, value.type.tensor_type.elem_type)
    names = {t: precision_of(t) for t in set(types.values())}
    return {k: names[t] for k, t in types.items()}
