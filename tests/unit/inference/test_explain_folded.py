# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A report of a model that is computed when the session is made: nothing runs, and that was seen."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path


def constant(path: Path) -> Path:
    value = numpy_helper.from_array(np.array([-1, 2], np.float32))
    nodes = [
        helper.make_node("Constant", [], ["k"], name="constant", value=value),
        helper.make_node("Relu", ["k"], ["y"], name="relu"),
    ]
    graph = helper.make_graph(nodes, "constant", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_model_of_constants_is_seen_whole(engine: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"the engine {engine} is not installed")
    with xrt.InferenceSession(constant(tmp_path / "constant.onnx"), device="cpu", engine=engine) as session:
        report = session.explain()
        np.testing.assert_array_equal(session.run({})["y"], [0, 2])
    assert [(unit.relation, unit.source_nodes) for unit in report.units] == [
        ("folded", ("constant",)),
        ("folded", ("relu",)),
    ]
    assert (report.headline, report.partial) == ("policy honoured", False), report.notes
    assert not any("generated" in note for note in report.notes), "there are no inputs"
