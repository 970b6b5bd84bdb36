# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Probe inputs, and comparing outputs."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import onnx
import precision_models as zoo
import pytest
from onnx import TensorProto, helper

from xpuruntime.engines.model import TensorInfo, inspect_bytes
from xpuruntime.engines.precision import names_in, probe_feeds, probe_shape
from xpuruntime.engines.precision.probe import probe_sizes
from xpuruntime.errors import InputError
from xpuruntime.evidence.tolerances import TOLERANCES, Tolerance, compare_within


def identity(elem_type, shape, name="x"):
    value = helper.make_tensor_value_info(name, elem_type, shape)
    out = helper.make_tensor_value_info("y", elem_type, shape)
    model = helper.make_model(helper.make_graph([helper.make_node("Identity", [name], ["y"])], "g", [value], [out]))
    return inspect_bytes(model)


def test_the_same_seed_gives_the_same_feeds():
    info = inspect_bytes(zoo.mlp())
    first, second, other = probe_feeds(info), probe_feeds(info), probe_feeds(info, seed=1)
    np.testing.assert_array_equal(first["x"], second["x"])
    assert (first["x"] != other["x"]).any()
    assert first["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (("N", 3, None, None), (1, 3, 64, 64)),
        (("batch_size", "sequence_length"), (1, 8)),
        (("b", 3, "height", "width"), (1, 3, 64, 64)),
        ((None, None), (1, 8)),
        ((2, 0, 5), (2, 0, 5)),
        ((), ()),
        (("batch", "heads", "past_sequence_length", 64), (1, 8, 0, 64)),
    ],
)
def test_shapes(shape, expected):
    assert probe_shape(TensorInfo(name="x", dtype="float32", shape=shape)) == expected


def test_dims_by_name_and_unknown_rank():
    info = TensorInfo(name="x", dtype="float32", shape=("N", "S"))
    assert probe_shape(info, {"S": 3}) == (1, 3)
    with pytest.raises(InputError, match="'x': its rank is not known"):
        probe_shape(TensorInfo(name="x", dtype="float32", shape=None))


def inputs(**shapes):
    return [TensorInfo(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (None, {"rows": 8, "past": 0}),
        ({"rows": 5}, {"rows": 5, "past": 0}),
        ({"past + rows": 9}, {"rows": 8, "past": 0, "past + rows": 9}),
    ],
)
def test_a_name_has_one_size_and_what_is_made_of_names_follows(dims, expected):
    made = inputs(x=("rows", 4), y=(4, "rows"), mask=(1, "past + rows"), z=("2*rows - 3", "(rows + 1)//2"), p=("past",))
    rows, past = expected["rows"], expected["past"]
    computed = {"past + rows": past + rows, "2*rows - 3": 2 * rows - 3, "(rows + 1)//2": (rows + 1) // 2}
    assert probe_sizes(made, dims) == {**computed, **expected}


@pytest.mark.parametrize("name", ["key-length", "a+b", "Max(1, rows)", "rows +", "", "8", "2 + 3", "batch size", "x.0"])
def test_what_is_no_expression_is_a_name(name):
    assert names_in(name) == (name,)
    assert probe_sizes(inputs(x=(name,)), {name: 3}) == {name: 3}


def test_names_that_stand_in_an_expression_alone():
    assert names_in("x.0 + 2*y_1 - x.0") == ("x.0", "y_1")
    assert probe_sizes(inputs(x=("batch*heads", 4))) == {"batch": 1, "heads": 8, "batch*heads": 8}
    for name, size in (("rows - 9", 3), ("8//rows", 0)):
        with pytest.raises(InputError, match=rf"rows={size} leaves no size for the dimension {name}. Fix: state other"):
            probe_sizes(inputs(x=("rows", 4), y=(name,)), {"rows": size})


def test_what_is_computed_keeps_its_own_limits_and_very_long_sums_are_names():
    (one,) = inputs(m=("b", "past + rows"))
    one = msgspec.structs.replace(one, limits=(None, (2, 4)))
    assert probe_sizes([one]) == {"b": 1, "past": 0, "rows": 8, "past + rows": 4}
    long = " + ".join(f"n{i}" for i in range(3000))
    assert names_in(long) == (long,)


def test_a_sequence_that_is_given_says_no_sizes():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (seq(float[n]) s, int64 i) => (float[k] z) { z = SequenceAt(s, i) }""")
    given = [np.zeros(2, np.float32), np.zeros(3, np.float32)]
    assert sorted(probe_feeds(inspect_bytes(model), overrides={"s": given})) == ["i", "s"]


def test_sizes_keep_the_limits_of_all_inputs_and_follow_arrays_that_are_given():
    one, other = inputs(x=("rows", 4), y=("rows", 4))
    one = msgspec.structs.replace(one, limits=((2, 16), None))
    other = msgspec.structs.replace(other, limits=((4, 32), None))
    assert probe_sizes([one, other]) == {"rows": 4}
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[rows, 4] x, float[rows, 4] y) => (float[rows, 4] z) { z = Add(x, y) }""")
    feeds = probe_feeds(inspect_bytes(model), overrides={"x": np.zeros((5, 4), np.float32)})
    assert feeds["y"].shape == (5, 4)


@pytest.mark.parametrize(
    "elem_type",
    [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN],
)
def test_every_numeric_type_has_values(elem_type):
    made = probe_feeds(identity(elem_type, [2, 3]))["x"]
    assert made.shape == (2, 3)
    assert made.dtype == helper.tensor_dtype_to_np_dtype(elem_type)


def test_integers_are_safe_indices_and_masks_are_open():
    feeds = probe_feeds(identity(7, [100]))
    assert set(np.unique(feeds["x"])) == {0, 1}
    assert (probe_feeds(identity(7, [100], "attention_mask"))["attention_mask"] == 1).all()
    assert probe_feeds(identity(9, [100], "mask"))["mask"].all()


def test_types_without_values_are_refused_and_can_be_given():
    info = identity(8, [2])
    with pytest.raises(InputError, match=r"'x' of type string.*Fix: give an array"):
        probe_feeds(info)
    array = np.array(["a", "b"])
    assert probe_feeds(info, overrides={"x": array})["x"] is array
    sequence = helper.make_tensor_sequence_value_info("s", 1, ["N"])
    out = helper.make_tensor_value_info("n", 7, [])
    model = helper.make_model(
        helper.make_graph([helper.make_node("SequenceLength", ["s"], ["n"])], "g", [sequence], [out])
    )
    with pytest.raises(InputError, match="it is a sequence"):
        probe_feeds(inspect_bytes(model))


def test_an_override_for_no_input_is_refused():
    with pytest.raises(InputError, match="no input 'X'; its inputs are 'x'"):
        probe_feeds(inspect_bytes(zoo.mlp()), overrides={"X": np.zeros(1)})


def compare(reference, candidate, **limits):
    wanted = {"rtol": 1e-2, "atol": 1e-3, "cosine": 0.999, **limits}
    return compare_within({"y": reference}, {"y": candidate}, Tolerance(**wanted))


def f32(*values):
    return np.array(values, np.float32)


def test_error_is_held_against_the_largest_magnitude():
    assert compare(f32(100, 0.001), f32(100, 0.5)).passed
    result = compare(f32(100, 0.001), f32(100, 2))
    assert not result.passed
    assert result.outputs[0].max_rel == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    ("reference", "candidate", "reason"),
    [
        (f32(1, 2), f32(np.nan, 2), "1 elements became NaN and 0 infinite"),
        (f32(1, 2), f32(np.inf, 2), "0 elements became NaN and 1 infinite"),
        (f32(np.inf, 2), f32(-np.inf, 2), "1 infinite"),
        (f32(np.nan, 2), f32(1, 2), "finite that are not in the reference"),
        (f32(1, 2), f32(1, 2, 3), r"shape is \(3,\), not \(2,\)"),
        (f32(1, 2), np.array([1, 2], np.float16), "dtype is float16, not float32"),
        (f32(1, 2), f32(-1, -2), "cosine -1"),
        (np.array([1, 2]), np.array([1, 3]), "1 of 2 elements differ"),
        (np.array([True]), np.array([False]), "1 of 1 elements differ"),
        (np.array(["a"]), np.array(["b"]), "1 of 1 elements differ"),
        ([f32(1), f32(2)], [f32(1)], "missing"),
        ({1: f32(1)}, {1: f32(2)}, "largest difference"),
    ],
)
def test_what_fails(reference, candidate, reason):
    result = compare(reference, candidate)
    assert not result.passed
    assert re.search(reason, next(o.reason for o in result.outputs if not o.passed))


@pytest.mark.parametrize(
    "values",
    [f32(np.nan, 1), f32(np.inf, -np.inf), f32(), f32(0, 0), np.array(["a"]), [f32(1), f32(2)], {1: f32(1)}],
)
def test_what_equals_itself(values):
    assert compare(values, values).passed


def test_noise_around_zero_has_no_direction():
    assert compare(f32(0, 0, 1e-5), f32(1e-5, 0, 0)).passed


def test_missing_and_extra_outputs():
    result = compare_within({"a": f32(1)}, {"b": f32(1)}, TOLERANCES["fp32"])
    assert [o.reason for o in result.outputs] == ["it is missing", "the reference has no such output"]


@pytest.mark.parametrize(
    ("reference", "candidate", "limits", "reason"),
    [
        (f32(0, 0), f32(0, 0), {}, "no finite value other than zero"),
        (f32(np.nan), f32(np.nan), {}, "no finite value other than zero"),
        (f32(1, 2), f32(0, 0), {"rtol": 1.5}, "the candidate has no finite value other than zero"),
        (f32(3, 3), f32(3, 3), {"cosine_stated": True}, "the same value everywhere"),
        (f32(1e-4, 2e-4), f32(1e-4, 2e-4), {}, "no value larger than atol 0.001"),
    ],
)
def test_outputs_on_which_the_limits_tell_nothing_are_inconclusive(reference, candidate, limits, reason):
    result = compare(reference, candidate, **limits)
    assert result.passed
    assert reason in result.inconclusive
    assert result.outputs[0].compared == 0
    assert (result.cosine is None) == (not reference.any() or not candidate.any() or bool(np.isnan(reference).all()))


def test_a_stated_cosine_is_judged_below_atol():
    small, other = f32(1e-6, 0, 2e-6), f32(2e-6, 0, 1e-6)
    assert compare(small, other).inconclusive
    result = compare(small, other, cosine_stated=True)
    assert "cosine 0.8" in result.outputs[0].reason
    assert compare(small, small, cosine_stated=True).inconclusive is None


def test_the_cosine_of_values_whose_squares_are_out_of_range():
    values = np.array([1e-200, 2e-200])
    assert compare(values, values, atol=0).cosine == pytest.approx(1)
