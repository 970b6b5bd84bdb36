# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recurrent nodes of one and of two directions: the unit that computes one stands for it, in the precision it has."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt

pytest.importorskip("openvino", reason="could not import 'openvino'")

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(op: str, direction: str, path: str) -> str:
    """Write a model of one recurrent node, of input 3 and state 5, between two sums."""
    directions = 2 if direction == "bidirectional" else 1
    rng = np.random.default_rng(2)
    weights = {
        "w": rng.normal(size=(directions, GATES[op] * 5, 3)),
        "r": rng.normal(size=(directions, GATES[op] * 5, 5)) / 3,
        "b": rng.normal(size=(directions, GATES[op] * 10)) / 3,
        "one": np.ones(1),
    }
    held = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", 3])]
    read = ["raised", "w", "r", "b"]
    nodes = [
        helper.make_node("Add", ["x", "one"], ["raised"], name="before"),
        helper.make_node(op, read, ["states", "last"], name="layer", direction=direction, hidden_size=5),
        helper.make_node("Mul", ["states", "states"], ["y"], name="after"),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", directions, "batch", 5]),
        helper.make_tensor_value_info("last", TensorProto.FLOAT, [directions, "batch", 5]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), path)
    return path


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", list(GATES))
def test_a_recurrent_node_is_its_layer_and_honoured_in_fp32(op, direction, tmp_path):
    path = recurrent(op, direction, str(tmp_path / "model.onnx"))
    feeds = {"x": np.random.default_rng(4).normal(size=(4, 2, 3)).astype(np.float32)}
    policy = {"mode": "strict", "execution": {"engine": "openvino", "device": "cpu", "precision": "fp32"}}
    with xrt.InferenceSession(path, policy=policy) as session:
        report = session.explain(feeds, runs=1)
    (unit,) = [unit for unit in report.units if "layer" in unit.source_nodes]
    assert (unit.op, unit.precision_run, unit.relation) == ("RNNSeq", "fp32", "exact"), unit
    steps = [unit for unit in report.units if unit.op == "RNNSeq"]
    assert len(steps) == (2 if direction == "bidirectional" else 1)
    assert all("layer" in (*step.source_nodes, *step.serves) for step in steps)
    assert report.honoured, report.deviations
