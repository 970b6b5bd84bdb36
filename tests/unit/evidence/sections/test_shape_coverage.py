# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Of which shapes a report speaks, from inputs made by hand."""

from __future__ import annotations

import pytest
from test_page_decisions import decision

from xpuruntime.engines.model.facts import TensorInfo
from xpuruntime.evidence.shape_coverage import shape_coverage


def tensor(shape, limits=(), name="x", **more):
    return TensorInfo(name=name, dtype="float32", shape=shape, limits=limits, **more)


def row(info, seen, **more):
    return shape_coverage([info], {} if seen is None else {info.name: seen}, **more).inputs[0]


def test_fixed_sizes_are_all_there_is():
    found = row(tensor((1, 3, 224, 224)), (1, 3, 224, 224))
    assert (found.model, found.allowed, found.observed) == ("1 x 3 x 224 x 224",) * 3
    assert (found.covered, found.reason) == ("all", "the model fixes every size")
    assert row(tensor((2, 3)), (2, 3), stated={"x": (2, 3)}).reason == "the policy fixes every size"


def test_an_open_size_is_covered_in_part():
    found = row(tensor(("batch", 3, None)), (4, 3, 7))
    assert (found.model, found.allowed, found.observed) == ("batch x 3 x ?", "any x 3 x any", "4 x 3 x 7")
    assert found.covered == "some"
    assert found.reason == "batch was 4 and may be any size, dimension 2 was 7 and may be any size"


def test_a_range_says_how_many_sizes_there_are():
    found = row(tensor(("batch", 3), ((1, 512), None)), (8, 3))
    assert (found.allowed, found.covered, found.reason) == ("1..512 x 3", "some", "batch was 8, one of 512 sizes")


def test_a_range_of_one_size_is_all():
    assert row(tensor(("batch", 3), ((8, 8), None)), (8, 3)).covered == "all"


def test_what_was_not_passed_and_what_has_no_shape():
    assert (row(tensor((3,)), None).covered, row(tensor((3,)), None).reason) == ("none", "nothing was passed")
    unknown = row(tensor(None), (2, 2))
    assert (unknown.model, unknown.allowed, unknown.covered) == ("any rank", "any", "some")
    sequence = row(tensor(None, kind="sequence"), None)
    assert (sequence.covered, sequence.observed) == ("none", "-")
    assert "of the kind sequence" in sequence.reason
    assert row(tensor(()), ()).reason == "it has no size"


@pytest.mark.parametrize(("seen", "words"), [((4, 3), "which was run"), ((2, 3), "and 2 x 3 was run")])
def test_a_profile_gives_the_range_and_its_best_shape(seen, words):
    coverage = shape_coverage([tensor(("batch", 3))], {"x": seen}, profiles={"x": ((1, 3), (4, 3), (16, 3))})
    assert (coverage.inputs[0].allowed, coverage.inputs[0].covered) == ("1..16 x 3", "some")
    assert coverage.by_shape == (f"the engine chose its kernels for x = 4 x 3, {words}",)


def test_decisions_hold_for_their_shapes_where_others_are_possible():
    decisions = [decision("a"), decision("b", op="layer_norm"), decision("c", shapes={})]
    told = shape_coverage([tensor(("n",))], {"x": (3,)}, decisions=decisions).by_shape
    assert len(told) == 1
    assert told[0].startswith(
        "2 decisions about xpuruntime kernels (matmul, layer_norm) hold for the shapes of this pass"
    )
    assert shape_coverage([tensor((3,))], {"x": (3,)}, decisions=decisions).by_shape == ()


def test_whole():
    fixed, open_ = tensor((1,), name="a"), tensor(("n",), name="b")
    seen = {"a": (1,), "b": (1,)}
    assert shape_coverage([fixed], seen).whole
    assert not shape_coverage([fixed, open_], seen).whole
