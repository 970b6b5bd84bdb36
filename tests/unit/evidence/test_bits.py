# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bitwise comparison and distances in units in the last place."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from xpuruntime.evidence.tolerances import differing, same_bits, ulp_distance


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, -0.0])
def test_steps_of_nextafter(dtype: type, start: float) -> None:
    """NumPy's `nextafter` is the judge: so many steps are so many units."""
    array = np.array([start, 5.0], dtype)
    other = array.copy()
    for _ in range(7):
        other[0] = np.nextafter(other[0], dtype(np.inf))
    assert ulp_distance(array, other) == 7
    assert ulp_distance(other, array) == 7
    assert not same_bits(array, other)


def test_zeros_of_both_signs_have_other_bits_and_no_distance() -> None:
    array, other = np.array([0.0]), np.array([-0.0])
    assert not same_bits(array, other)
    assert ulp_distance(array, other) == 0


def test_across_zero_and_over_the_whole_range() -> None:
    low, high = np.finfo(np.float64).min, np.finfo(np.float64).max
    steps = ulp_distance(np.array([low]), np.array([high]))
    assert steps == 2 * int(np.array([high]).view(np.int64)[0])
    assert ulp_distance(np.array([-(2**63)]), np.array([2**63 - 1])) == 2**64 - 1
    assert ulp_distance(np.array([0], np.uint64), np.array([2**64 - 1], np.uint64)) == 2**64 - 1
    assert ulp_distance(np.array([True]), np.array([False])) == 1


def test_bfloat16_has_steps_of_its_own() -> None:
    array = np.array([1.0], ml_dtypes.bfloat16)
    assert ulp_distance(array, np.array([1.0078125], ml_dtypes.bfloat16)) == 1


def test_what_has_no_distance() -> None:
    nan = np.array([np.nan, 1.0])
    assert same_bits(nan, nan.copy())
    assert ulp_distance(nan, np.array([1.0, 1.0])) is None
    assert ulp_distance(np.array([1.0]), np.array([1.0, 2.0])) is None
    assert ulp_distance(np.array([1.0]), np.array([1.0], np.float32)) is None
    assert ulp_distance(np.array(["a"]), np.array(["b"])) is None
    assert ulp_distance(np.zeros(0), np.zeros(0)) == 0


def test_names_that_differ() -> None:
    want = {"a": np.zeros(2), "b": np.zeros(2), "c": np.array("x", object)}
    got = {"a": np.zeros(2), "b": np.ones(2), "c": np.array("y", object), "d": np.zeros(1)}
    assert differing(want, got) == ("b", "c")
