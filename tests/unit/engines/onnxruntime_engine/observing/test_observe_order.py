# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX Runtime orders and numbers what it inserts anew in each load; what is attributed to source nodes stays."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units


def branches() -> onnx.ModelProto:
    """Return a model in which two branches read a value whose name the optimizers drop, as detectors have them."""
    count = itertools.count()
    nodes: list[Any] = []
    weights: list[Any] = []
    rng = np.random.default_rng(0)

    def block(given: str) -> str:
        """Add a convolution and x * sigmoid(x)."""
        index = next(count)
        weights.append(numpy_helper.from_array(rng.standard_normal((16, 16, 3, 3)).astype(np.float32), f"w{index}"))
        conv, sigmoid, mul = (f"/b{index}/{name}" for name in ("conv/Conv", "act/Sigmoid", "act/Mul"))
        out = [f"{name}_output_0" for name in (conv, sigmoid, mul)]  # as PyTorch's exporter names them
        nodes.append(helper.make_node("Conv", [given, f"w{index}"], out[:1], conv, pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Sigmoid", out[:1], out[1:2], sigmoid))
        nodes.append(helper.make_node("Mul", out[:2], out[2:], mul))
        return out[2]

    trunk = block(block("x"))
    ends = [block(block(trunk)) for _ in range(3)]
    nodes.append(helper.make_node("Concat", ends, ["y"], "concat", axis=1))
    shape = [1, 16, 8, 8]
    graph = helper.make_graph(
        nodes,
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = tmp_path_factory.mktemp("order") / "optimized.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    ort.InferenceSession(branches().SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(Path(path))


def shuffled(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Return the graph with its nodes in another order that runs, and its generated names numbered anew."""
    rng = random.Random(seed)
    text = model.SerializeToString()
    tokens = sorted({match.decode() for match in re.findall(rb"_token_\d+", text)})
    renamed = dict(zip(tokens, rng.sample(tokens, len(tokens)), strict=True))
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    for node in proto.graph.node:
        node.name = re.sub(r"_token_\d+", lambda one: renamed[one[0]], node.name)
        for names in (node.input, node.output):
            names[:] = [re.sub(r"_token_\d+", lambda one: renamed[one[0]], name) for name in names]
    left = list(proto.graph.node)
    made_by = {name for node in left for name in node.output}
    done: set[str] = set()
    order = []
    while left:
        ready = [node for node in left if all(name in done or name not in made_by for name in node.input)]
        node = rng.choice(ready)
        left.remove(node)
        order.append(node)
        done.update(node.output)
    del proto.graph.node[:]
    proto.graph.node.extend(order)
    return proto


def test_the_order_of_the_executed_graph_changes_nothing(optimized: onnx.ModelProto) -> None:
    source = branches()

    def attributed(graph: onnx.ModelProto) -> list[tuple[Any, ...]]:
        units = attribute_units(source, graph, (), None).units
        return sorted((unit.source_nodes, unit.op, unit.relation, unit.serves) for unit in units)

    expected = attributed(optimized)
    assert {names for names, op, *_ in expected if op == "QuickGelu"} == {
        (f"/b{index}/act/Sigmoid", f"/b{index}/act/Mul") for index in range(8)
    }
    for seed in range(20):
        assert attributed(shuffled(optimized, seed)) == expected
