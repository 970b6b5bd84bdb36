# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model file that is replaced while its session is open: a report must not speak of the new one."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, op: str) -> None:
    value = helper.make_tensor_value_info
    node = helper.make_node(op, ["x"], ["y"], name="node")
    sides = [value("x", TensorProto.FLOAT, [4])], [value("y", TensorProto.FLOAT, [4])]
    model = helper.make_model(
        helper.make_graph([node], op, *sides), opset_imports=[helper.make_opsetid("", 17)], ir_version=10
    )
    onnx.save(model, path)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_model_that_was_replaced_is_not_taken_for_the_sessions(engine: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"the engine {engine} is not installed")
    path = tmp_path / "model.onnx"
    write(path, "Exp")
    x = np.zeros(4, np.float32)
    with xrt.InferenceSession(path, device="cpu", engine=engine) as session:
        assert session.explain({"x": x}, runs=1).honoured
        write(path, "HardSwish")
        report = session.explain({"x": x}, runs=1)
        np.testing.assert_array_equal(session.run({"x": x})["y"], np.ones(4, np.float32))
    assert report.partial
    assert (report.headline, report.units) == ("nothing observed", ())
    assert any("the file changed since it was inspected" in note for note in report.notes), report.notes
    assert [node.op for node in report.graph] == ["Exp"]
