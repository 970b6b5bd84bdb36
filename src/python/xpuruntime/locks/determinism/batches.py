# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Batch`: the batch dimension of a model, and inputs of as many rows as a test needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.model import TensorInfo

__all__ = ["DEFAULT_SIZES", "Batch", "NoBatch", "find_batch", "other_inputs"]

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

#: Sizes of batches that are compared with rows alone, where neither the call nor the policy states any.
DEFAULT_SIZES = (2, 3, 4, 8, 16)
#: Rows of the batch whose rows change places.
_PERMUTED = 8


class NoBatch(NamedTuple):
    """Why a model has no batch dimension that can be tested."""

    reason: str


class Batch(NamedTuple):
    """A batch dimension."""

    dimension: str
    axes: dict[str, int]
    rows: Feeds
    total: int
    sizes: tuple[int, ...]
    permuted: int

    def take(self, index: Sequence[int]) -> Feeds:
        """Return inputs of these rows."""
        return {
            name: np.take(array, list(index), axis=self.axes[name]) if name in self.axes else array
            for name, array in self.rows.items()
        }


def find_batch(
    inputs: Sequence[TensorInfo], feeds: Mapping[str, Array], sizes: Sequence[int] | None, dimension: str | None
) -> Batch | NoBatch:
    """Find the batch dimension and make rows for it.

    It is the first open dimension of the first input that begins with one, or the one that is named, wherever the
    inputs have it. Where no input begins with an open dimension and all begin with the same fixed size of more than
    one, that is a batch whose size cannot change.
    """
    tensors = [tensor for tensor in inputs if tensor.name in feeds and feeds[tensor.name].ndim]
    key, axes = _axes(tensors, dimension)
    if not axes:
        return _fixed(tensors, feeds)
    name = key if isinstance(key, str) else f"{next(iter(axes))}.0"
    low, high = _limits(tensors, axes)
    wanted = tuple(sorted(set(sizes))) if sizes else _default_sizes(low, high)
    for size in wanted:
        if not low <= size <= high:
            raise InputError(
                f"batch size {size}: the policy allows {low} to {high} for the dimension {name!r}. Fix: give other "
                "sizes, or change execution.shapes"
            )
    if low > 1:
        return NoBatch(f"the policy allows no batch of one row: {name!r} is {low} at least")
    wanted = tuple(size for size in wanted if size > 1)
    if not wanted:
        return NoBatch(f"the policy allows one row alone in the dimension {name!r}")
    permuted = max((size for size in wanted if size <= _PERMUTED), default=wanted[0])
    count = max(wanted)
    present = {feeds[one].shape[axis] for one, axis in axes.items()}
    if len(present) != 1:
        return NoBatch(f"the inputs have different sizes {sorted(present)} in the dimension {name!r}")
    rows = {one: _rows(array, axes[one], count) if one in axes else array for one, array in feeds.items()}
    return Batch(name, axes, rows, count, wanted, permuted)


def other_inputs(feeds: Mapping[str, Array], batch: Batch | NoBatch) -> list[Feeds]:
    """Return inputs to run in between: two of the same shapes with other values, and one of another batch size."""
    found = [{name: _varied(array, step) for name, array in feeds.items()} for step in (1, 2)]
    if isinstance(batch, Batch) and batch.sizes:
        size = next(iter(feeds[name].shape[axis] for name, axis in batch.axes.items()))
        found.append(batch.take(range(next((one for one in batch.sizes if one != size), 1))))
    return found


def _axes(tensors: Sequence[TensorInfo], dimension: str | None) -> tuple[str | None, dict[str, int]]:
    """Return the open size that is the batch, a name or ``None``, and its axis in each input that has it."""
    if dimension is not None:
        axes = {one.name: one.shape.index(dimension) for one in tensors if one.shape and dimension in one.shape}
        first, dot, index = dimension.rpartition(".")
        if not axes and dot and index == "0":
            axes = {one.name: 0 for one in tensors if one.name == first and one.shape and one.shape[0] is None}
            return None, axes
        if not axes:
            raise InputError(f"the model has no open dimension {dimension!r}")
        return dimension, axes
    return batch_axes(tensors)


def _fixed(tensors: Sequence[TensorInfo], feeds: Mapping[str, Array]) -> Batch | NoBatch:
    first = {feeds[one.name].shape[0] for one in tensors}
    if not tensors:
        return NoBatch("no input has a dimension")
    size = next(iter(first))
    if len(first) != 1 or size < 2:
        return NoBatch("no input begins with an open dimension, and a batch of one fixed size has one row")
    axes = {one.name: 0 for one in tensors}
    rows = {name: _rows(array, 0, size) if name in axes else array for name, array in feeds.items()}
    return Batch(f"{tensors[0].name}.0", axes, rows, size, (), size)


def _limits(tensors: Sequence[TensorInfo], axes: Mapping[str, int]) -> tuple[int, int]:
    """Return the least and the largest size that the policy allows."""
    low, high = 1, 1 << 31
    for tensor in tensors:
        if tensor.name in axes and tensor.limits and (limit := tensor.limits[axes[tensor.name]]) is not None:
            low, high = max(low, limit[0]), min(high, limit[1])
    return low, high


def _default_sizes(low: int, high: int) -> tuple[int, ...]:
    """Return the usual sizes as far as they are allowed, and both ends of what the policy states."""
    ends = {low, high} if high < 1 << 31 else set()
    return tuple(sorted({size for size in DEFAULT_SIZES if low <= size <= high} | ends))


def _rows(array: Array, axis: int, count: int) -> Array:
    """Return an array with `count` different rows: its own first, then its own with the values moved along."""
    own = array.shape[axis]
    if own == 0:
        raise InputError("an input has no rows; give one row or more")
    parts = [np.take(_varied(array, step), range(own), axis=axis) for step in range(-(-count // own))]
    return np.take(np.concatenate(parts, axis=axis), range(count), axis=axis)


def _varied(array: Array, step: int) -> Array:
    """Return values that the model takes too: the same in another order along the last axis, floats smaller as well."""
    if not step or array.dtype.kind not in "biufV":
        return array
    moved = np.roll(array, step, axis=-1) if array.ndim else array
    return (moved * array.dtype.type(1 - step / 64)).astype(array.dtype) if array.dtype.kind == "f" else moved
