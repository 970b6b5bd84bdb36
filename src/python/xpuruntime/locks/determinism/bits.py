# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bitwise comparison of arrays, and their distance in units in the last place (ulp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["differing", "kept", "same_bits", "ulp_distance"]

Array = np.ndarray[Any, Any]

_BITS = {2: np.int16, 4: np.int32, 8: np.int64}


def kept(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return copies of the results of a run on the host."""
    return {name: np.array(value, copy=True) for name, value in outputs.items()}


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are the same, bit for bit: NaN equals the same NaN, and 0.0 is not -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == object:
        return bool(np.array_equal(one, other))
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def differing(want: Mapping[str, Array], got: Mapping[str, Array]) -> tuple[str, ...]:
    """Return the names of arrays that both have and that differ."""
    return tuple(name for name in want if name in got and not same_bits(want[name], got[name]))


def ulp_distance(one: Array, other: Array) -> int | None:
    """Return the largest distance of two elements, in units in the last place; of integers, in steps of one.

    ``None`` where elements are no numbers, shapes differ, or of two different elements one is not finite.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return None
    if one.dtype.kind in "iub":
        wide = np.uint64 if one.dtype == np.uint64 else np.int64
        return _largest_step(one.astype(wide), other.astype(wide))
    bits = _BITS.get(one.dtype.itemsize)
    if bits is None or one.dtype.name not in ("float16", "float32", "float64", "bfloat16"):
        return None
    left, right = (np.ascontiguousarray(array).view(bits) for array in (one, other))
    moved = left != right
    if not moved.any():
        return 0
    finite = np.isfinite(one[moved].astype(np.float64)) & np.isfinite(other[moved].astype(np.float64))
    if not finite.all():
        return None
    return _largest_step(_ordered(left[moved]), _ordered(right[moved]))


def _largest_step(one: Array, other: Array) -> int:
    """Return the largest difference of two arrays of 64-bit integers: the true one fits into 64 bits without a sign."""
    if not one.size:
        return 0
    high, low = np.maximum(one, other), np.minimum(one, other)
    return int((high.view(np.uint64) - low.view(np.uint64)).max())


def _ordered(bits: Array) -> Array:
    """Return the bits of floats as integers in the order of the floats, in which -0.0 and 0.0 are one."""
    wide = bits.astype(np.int64)
    lowest = np.iinfo(bits.dtype).min
    return np.where(wide < 0, lowest - wide, wide)
