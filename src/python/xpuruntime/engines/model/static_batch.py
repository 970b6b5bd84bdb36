# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Static batch of a model, for ``execution.static_batch``: one size for its batch dimension.

A batch dimension that was fixed so has the size itself in `TensorInfo.shape` and ``(1, size)`` in `TensorInfo.limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.model.facts import TensorInfo
    from xpuruntime.engines.model.info import ModelInfo

__all__ = ["OPEN", "batch_axes", "fixed_axes", "with_open_batch", "with_static_batch"]

#: Name of the batch dimension of a session whose engine runs one size.
OPEN = "batch"


def batch_axes(inputs: Sequence[TensorInfo]) -> tuple[str | None, dict[str, int]]:
    """Return the batch dimension, its name or ``None``, and its axis in each input that has it.

    It is the open first dimension of the first input that begins with one. Where that has a name, other inputs may have
    it at another place; where not, it is the first dimension of all inputs whose first has no name.
    """
    leading = [one for one in inputs if one.shape and not isinstance(one.shape[0], int)]
    if not leading or not leading[0].shape:
        return None, {}
    key = leading[0].shape[0]
    if not isinstance(key, str):
        return None, {one.name: 0 for one in leading if one.shape and one.shape[0] is None}
    return key, {one.name: one.shape.index(key) for one in inputs if one.shape and key in one.shape}


def with_static_batch(info: ModelInfo, size: int) -> ModelInfo:
    """Return the model with its batch dimension fixed in inputs, outputs and graph, unless it is already fixed."""
    if fixed_axes(info.inputs):
        return info
    key, axes = batch_axes(info.inputs)
    if not axes:
        raise PolicyError(
            f"execution.static_batch: {size}, but no input of {info.path} begins with an open dimension; leave it out"
        )
    for tensor in info.inputs:
        if tensor.name in axes and _ranged(tensor, axes[tensor.name]) and info.format == "onnx":
            raise PolicyError(
                f"execution.static_batch: {size} contradicts the range of the batch in execution.shapes.{tensor.name}; "
                "state one of the two"
            )
    outputs = {
        one.name: one.shape.index(key) if isinstance(key, str) else 0
        for one in info.outputs
        if one.shape and (key in one.shape if isinstance(key, str) else one.shape[0] is None)
    }
    fixed = {
        one.name: tuple(
            size if axis == axes[one.name] else known
            for axis, known in enumerate(info.fixed.get(one.name, (None,) * len(one.shape or ())))
        )
        for one in info.inputs
        if one.name in axes
    }
    return msgspec.structs.replace(
        info,
        inputs=tuple(_marked(one, axes.get(one.name), size) for one in info.inputs),
        outputs=tuple(_marked(one, outputs.get(one.name), size) for one in info.outputs),
        fixed={**info.fixed, **fixed},
    )


def fixed_axes(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """Return the axis of the batch in the tensors where `with_static_batch` has fixed it."""
    found = {}
    for tensor in tensors:
        for axis, (size, limit) in enumerate(zip(tensor.shape or (), tensor.limits, strict=False)):
            if limit == (1, size) and tensor.name not in found:
                found[tensor.name] = axis
    return found


def with_open_batch(info: ModelInfo) -> ModelInfo:
    """Return the model as callers see it: the batch dimension has a name and the sizes 1 to the fixed one."""
    return msgspec.structs.replace(
        info,
        inputs=tuple(_opened(one) for one in info.inputs),
        outputs=tuple(_opened(one) for one in info.outputs),
    )


def _ranged(tensor: TensorInfo, axis: int) -> bool:
    return bool(tensor.limits) and tensor.limits[axis] is not None


def _marked(tensor: TensorInfo, axis: int | None, size: int) -> TensorInfo:
    if axis is None or tensor.shape is None:
        return tensor
    limits = tensor.limits or (None,) * len(tensor.shape)
    return msgspec.structs.replace(
        tensor,
        shape=tuple(size if place == axis else one for place, one in enumerate(tensor.shape)),
        limits=tuple((1, size) if place == axis else one for place, one in enumerate(limits)),
    )


def _opened(tensor: TensorInfo) -> TensorInfo:
    axis = fixed_axes((tensor,)).get(tensor.name)
    if axis is None or tensor.shape is None:
        return tensor
    shape = tuple(OPEN if place == axis else one for place, one in enumerate(tensor.shape))
    return msgspec.structs.replace(tensor, shape=shape)
