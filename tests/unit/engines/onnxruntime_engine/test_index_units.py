# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Units of indices: what an optimizer makes of nodes of floats and reads shapes alone is under no precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import parser

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 4, 6] x) => (float[a, b, c] y, int64[k] s)'
X = {"x": np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)}
#: ONNX Runtime makes a Gather of the sizes out of each pair of a Transpose and a Shape, or the like.
BODIES = {
    "shape of a transpose": "{ y = Relu(x) t = Transpose<perm = [2, 0, 1]>(y) s = Shape(t) }",
    "both read": "{ t = Transpose<perm = [2, 0, 1]>(x) s = Shape(t) y = Relu(t) }",
    "arg max": "{ t = Relu(x) m = ArgMax<axis = 1, keepdims = 0>(t) s = Shape(m) y = Exp(t) }",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("precision", ["fp32", "model"])
def test_what_only_reads_sizes_deviates_from_no_precision(name: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(HEAD + BODIES[name]), path)
    execution = {"engine": "onnxruntime", "device": "cpu", "precision": precision}
    with xrt.InferenceSession(path, policy={"mode": "strict", "execution": execution}) as session:
        report = session.explain(X, runs=1)
    assert report.honoured, report.deviations
    ran = {unit.op: unit.precision_requested for unit in report.units if unit.precision_run == "int64"}
    if name == "shape of a transpose":
        assert ran == {"Gather": None}, "the rewriting that this is about"


#: Operators that ONNX Runtime writes out on the CPU, computing sizes on the way; with a function of the model's own.
WRITTEN_OUT = {
    "GroupNormalization": """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 4, 6] x) => (float[N, 4, 6] y) <float[4] s = {1, 2, 3, 4}, float[4] b = {0, 1, 0, 1}>
        { y = GroupNormalization<num_groups = 2>(x, s, b) }""",
    "function": """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[N, 4, 6] x) => (float[K, M] y) { r = Relu(x) y = own.Rows(r) }
        <domain: "own", opset_import: ["" : 21]> Rows (v) => (w) {
            n = Shape<start = 0, end = 1>(v) rest = Constant<value_ints = [-1]>()
            one = Constant<value_ints = [1]>() k = Mul(n, one) to = Concat<axis = 0>(k, rest) w = Reshape(v, to) }""",
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
@pytest.mark.parametrize("precision", ["fp32", "model"])
def test_sizes_in_an_operator_that_is_written_out_deviate_from_no_precision(
    name: str, precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(WRITTEN_OUT[name]), path)
    execution = {"engine": "onnxruntime", "device": "cpu", "precision": precision}
    with xrt.InferenceSession(path, policy={"mode": "strict", "execution": execution}) as session:
        report = session.explain(X, runs=1)
    assert report.honoured, report.deviations
    sizes = [unit for unit in report.units if (unit.precision_run or "").endswith("int64")]
    assert sizes, "the sizes that this is about"
    assert {unit.precision_requested for unit in sizes} == {None}
    assert any(unit.precision_requested == "fp32" and unit.precision_run == "fp32" for unit in report.units)
