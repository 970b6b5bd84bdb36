# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Quantizing models whose own names are those that the quantizer derives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from quantized_models import calibrated, cosine, graph_of, run

from xpuruntime.engines.quantization import quantize
from xpuruntime.engines.quantization.quantizers import Aliases

#: What the quantizer puts behind the name of a tensor, and behind that of a bias which two nodes read.
ENDINGS = [
    "1",
    "2",
    "_scale",
    "_zero_point",
    "_quantized",
    "_quantized_scale",
    "_QuantizeLinear_Input",
    "_QuantizeLinear_Output",
    "_DequantizeLinear_Output",
    "_DequantizeLinear",
    "_ReduceMin",
    "_ReduceMax",
]


def two_convolutions(middle: str, bias: str = "bias", weight: str = "w", held: str = "x") -> onnx.ModelProto:
    """Return x -> Conv -> Relu -> Conv -> y; both convolutions read one bias, and the value between is `middle`."""
    rng = np.random.default_rng(3)
    weights = [
        numpy_helper.from_array(rng.normal(size=(4, 4, 3, 3)).astype(np.float32) / 4, weight),
        numpy_helper.from_array(rng.normal(size=(4, 4, 1, 1)).astype(np.float32), "other"),
        numpy_helper.from_array(rng.normal(size=4).astype(np.float32), bias),
    ]
    nodes = [
        helper.make_node("Conv", [held, weight, bias], [middle], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [middle], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "other", bias], ["y"], name="second"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(held, TensorProto.FLOAT, [1, 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 6, 6])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("style", ["ort-cpu", "qnn"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("of", ["x", "bias", "w"])
def test_names_of_the_quantizer_do_not_meet_those_of_the_model(style, ending, of):
    model = two_convolutions(of + ending)
    rng = np.random.default_rng(5)
    data = {"x": rng.normal(size=(4, 1, 4, 6, 6)).astype(np.float32)}
    info, calibration = calibrated(model, data)
    made = quantize(info, calibration, style)
    onnx.checker.check_model(graph_of(made), full_check=True)
    assert [value.name for value in graph_of(made).graph.input] == ["x"]
    feeds = {"x": data["x"][0]}
    for want, got in zip(run(model.SerializeToString(), feeds), run(made.data, feeds, optimise=False), strict=True):
        assert cosine(want, got) > 0.99
    assert made.regions["first"][0] == "first"
    assert {"first", "second"} <= set(made.quantized_nodes)


@pytest.mark.parametrize("name", ["t0#", "t1#_scale", "t", "t_0#"])
def test_aliases_are_none_of_the_names_and_undone_they_leave_the_graph(name):
    model = two_convolutions(name)
    aliases = Aliases(model)
    there = aliases.apply(model)
    assert not set(aliases.of) & set(aliases.of.values())
    assert not {output for node in there.graph.node for output in node.output} & set(aliases.of)
    aliases.undo(there)
    assert there == model
