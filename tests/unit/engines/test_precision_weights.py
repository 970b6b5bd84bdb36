# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rounding of weights, against NumPy, ml_dtypes and ONNX Runtime's own converter."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from xpuruntime.engines.precision.judge import _library_block_list, library_block_list
from xpuruntime.engines.precision.rewrite import round_tensor, round_values


def sample():
    """All kinds of fp32: every exponent and sign, ties, limits, and random bits."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (random.integers(0, 1 << 16, 5000).astype(np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    edges = np.array([0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 2**-24, 2**-25, 1e-45, 3.4e38], np.float32)
    values = np.concatenate([values, edges, -edges])
    return values[~np.isnan(values)]


def test_bf16_rounds_as_ml_dtypes_where_it_stays_in_range():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = sample()
    rounded = round_values(values, TensorProto.BFLOAT16)
    want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    outside = ((want & 0x7FFF) == 0x7F80) & np.isfinite(values) | ((want & 0x7FFF) == 0) & (values != 0)
    np.testing.assert_array_equal(rounded.bits[~outside], want[~outside])
    assert rounded.over + rounded.under == outside.sum() > 0
    assert set(rounded.bits[outside] & 0x7FFF) <= {0x7F7F, 1}


def test_fp16_rounds_as_the_library_converter():
    from onnxruntime.transformers.float16 import convert_np_to_float16

    values = sample()
    rounded = round_values(values, TensorProto.FLOAT16)
    want = convert_np_to_float16(values)
    np.testing.assert_array_equal(rounded.bits, want.view(np.uint16))
    assert rounded.over == (np.isfinite(values) & (np.abs(values) > 65504)).sum()


def test_large_tensors_are_rounded_in_blocks_like_small_ones(monkeypatch):
    monkeypatch.setattr("xpuruntime.engines.precision.rewrite._BLOCK", 1000)
    values = sample()[:5500]
    made, rounded = round_tensor(numpy_helper.from_array(values, "w"), TensorProto.FLOAT16)
    whole = round_values(values, TensorProto.FLOAT16)
    np.testing.assert_array_equal(np.frombuffer(made.raw_data, "<u2"), whole.bits)
    assert (rounded.over, rounded.under) == (whole.over, whole.under)


@pytest.mark.parametrize("target", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_nan_and_infinity_stay(target):
    rounded = round_values(np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32), target)
    quiet = np.frombuffer(np.uint32(0x7F800001).tobytes(), np.float32)  # a NaN whose bits would round to infinity
    mask, top = (0x7FFF, 0x7C00) if target == TensorProto.FLOAT16 else (0x7FFF, 0x7F80)
    assert ((rounded.bits[:2] & mask) > top).all()
    np.testing.assert_array_equal(rounded.bits[2:] & mask, top)
    assert (round_values(quiet, target).bits & mask > top).all()
    assert rounded.over == rounded.under == 0


def test_values_are_not_changed_in_place():
    values = np.array([1e9, 1e-12, 1.0], np.float32)
    round_values(values, TensorProto.FLOAT16)
    np.testing.assert_array_equal(values, np.array([1e9, 1e-12, 1.0], np.float32))


def test_reading_the_library_block_list_leaves_the_search_path_alone():
    before = list(sys.path)
    _library_block_list.cache_clear()
    assert {"Max", "TopK", "NonMaxSuppression"} <= library_block_list()
    assert sys.path == before
