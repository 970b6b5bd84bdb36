# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What OpenVINO's own words must not be mistaken for: deviations that are none, times of what ran once, lost inputs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino_sessions import VALUE, model, open_

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("openvino")

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
NODE = helper.make_node


def branching() -> onnx.ModelProto:
    """An If: OpenVINO's precision of it is that of the condition, which is eight bits."""
    then = helper.make_graph([NODE("Mul", ["x", "x"], ["t"], "square")], "then", [], [VALUE("t", FLOAT, [2, 8])])
    other = helper.make_graph([NODE("Neg", ["x"], ["e"], "neg")], "other", [], [VALUE("e", FLOAT, [2, 8])])
    nodes = [NODE("If", ["c"], ["b"], "if", then_branch=then, else_branch=other), NODE("Exp", ["b"], ["y"], "exp")]
    return model(nodes, [VALUE("x", FLOAT, [2, 8]), VALUE("c", BOOL, [])], [VALUE("y", FLOAT, [2, 8])])


def looping() -> onnx.ModelProto:
    """A Loop: that of its counter."""
    nodes = [NODE("Identity", ["go"], ["on"], "on"), NODE("Tanh", ["v"], ["w"], "tanh")]
    given = [VALUE("i", INT64, []), VALUE("go", BOOL, []), VALUE("v", FLOAT, [2, 8])]
    body = helper.make_graph(nodes, "body", given, [VALUE("on", BOOL, []), VALUE("w", FLOAT, [2, 8])])
    loop = NODE("Loop", ["n", "", "x"], ["y"], "loop", body=body)
    weights = (numpy_helper.from_array(np.int64(3), "n"),)
    return model([loop], [VALUE("x", FLOAT, [2, 8])], [VALUE("y", FLOAT, [2, 8])], weights)


def choosing() -> onnx.ModelProto:
    """A Where, which reads its condition first, and a Cast of whole numbers, which says what it makes."""
    nodes = [
        NODE("Where", ["c", "x", "x2"], ["w"], "where"),
        NODE("Cast", ["i"], ["f"], "cast", to=FLOAT),
        NODE("Add", ["w", "f"], ["y"], "add"),
    ]
    given = [VALUE("c", BOOL, [2, 8]), VALUE("i", INT64, [2, 8]), *(VALUE(n, FLOAT, [2, 8]) for n in ("x", "x2"))]
    return model(nodes, given, [VALUE("y", FLOAT, [2, 8])])


def quantized() -> onnx.ModelProto:
    """A pool and an addition between what the model itself quantizes: eight bits go through them."""
    nodes = [
        NODE("QuantizeLinear", ["x", "s", "z"], ["q0"], "quantize"),
        NODE("DequantizeLinear", ["q0", "s", "z"], ["d0"], "back"),
        NODE("MaxPool", ["d0"], ["p"], "pool", kernel_shape=[2, 2]),
        NODE("QuantizeLinear", ["p", "s", "z"], ["q1"], "quantize2"),
        NODE("DequantizeLinear", ["q1", "s", "z"], ["d1"], "back2"),
        NODE("Add", ["d1", "d1"], ["y"], "add"),
    ]
    weights = (numpy_helper.from_array(np.float32(0.02), "s"), numpy_helper.from_array(np.uint8(128), "z"))
    return model(nodes, [VALUE("x", FLOAT, [1, 4, 8, 8])], [VALUE("y", FLOAT, [1, 4, 7, 7])], weights)


def dynamic_quantization() -> onnx.ModelProto:
    """A product of whole numbers with a constant weight."""
    nodes = [
        NODE("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "quantize"),
        NODE("MatMulInteger", ["q", "w", "z", "wz"], ["m"], "matmul"),
        NODE("Cast", ["m"], ["f"], "cast", to=FLOAT),
        NODE("Mul", ["f", "s"], ["y"], "scale"),
    ]
    values = np.random.default_rng(0).integers(-60, 60, (16, 16)).astype(np.int8)
    weights = (numpy_helper.from_array(values, "w"), numpy_helper.from_array(np.int8(0), "wz"))
    return model(nodes, [VALUE("x", FLOAT, [4, 16])], [VALUE("y", FLOAT, [4, 16])], weights)


def explained(proto: onnx.ModelProto, folder: Path, **options: Any) -> xrt.Report:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    with open_(path, **options) as session:
        report = session.explain(runs=3)
        told = Counter(name for unit in report.units for name in unit.source_nodes)
        assert told == Counter(node.name for node in session.model.nodes)
    return report


@pytest.mark.parametrize(
    ("make", "precision"),
    [(made, word) for made in (branching, looping, choosing) for word in ("model", "fp32")] + [(quantized, "model")],
)
def test_what_is_run_as_asked_is_no_deviation(make: Any, precision: str, tmp_path: Path) -> None:
    report = explained(make(), tmp_path, precision=precision)
    assert report.honoured, report
    assert not [unit.id for unit in report.units if unit.status == "substituted"]


def test_whole_numbers_that_run_as_floats_are_still_a_deviation(tmp_path: Path) -> None:
    report = explained(dynamic_quantization(), tmp_path)
    [product] = [unit for unit in report.units if "matmul" in unit.source_nodes]
    assert product.precision_requested == "int8"
    assert report.honoured is (product.precision_run in ("int8", "uint8"))


def test_a_constant_that_is_prepared_in_the_first_run_has_no_time(tmp_path: Path) -> None:
    """OpenVINO goes on telling the milliseconds of its only run as the mean of all."""
    report = explained(dynamic_quantization(), tmp_path)
    once = [unit for unit in report.units if unit.placement_reason and "first run alone" in unit.placement_reason]
    assert once, [(unit.id, unit.time) for unit in report.units]
    assert all(one.time is None for one in once)
    assert report.latency is not None
    assert report.latency.detail["instrumented"]["units"] == sum(unit.time is not None for unit in report.units)


@pytest.mark.parametrize("again", ["run", "bind", "compile"])
def test_inputs_behind_nodes_that_are_removed_are_found(again: str, tmp_path: Path) -> None:
    """OpenVINO's ports then have the names of what the removed nodes made, and not those of the inputs."""
    nodes = [
        NODE("Identity", ["b"], ["b1"], "first"),
        NODE("Dropout", ["b1"], ["b2"], "second"),
        NODE("Identity", ["a"], ["a1"], "third"),
        NODE("Sub", ["a1", "b2"], ["y"], "sub"),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(model(nodes, [VALUE(n, FLOAT, [2, 8]) for n in "ab"], [VALUE("y", FLOAT, [2, 8])]), path)
    if again == "compile":
        xrt.compile_model(path, tmp_path / "model.xrt", device="cpu", engine="openvino")
        path = tmp_path / "model.xrt"
    given = {"a": np.full((2, 8), 5, np.float32), "b": np.full((2, 8), 3, np.float32)}
    with open_(path) as session:
        if again == "bind":
            bound = session.bind(given)
            bound.run()
            made = bound.outputs["y"]
        else:
            made = session.run(given)["y"]
        np.testing.assert_array_equal(np.asarray(made), np.full((2, 8), 2, np.float32))
        assert session.explain(given, runs=1).honoured
