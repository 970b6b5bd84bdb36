# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Nodes inside If, Loop and Scan: those that ran are joined by their subgraph, and none is called folded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(0)
INNER = ("conv", "relu", "flat", "product", "activation")


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def value(name: str, shape: Any, kind: int = T.FLOAT) -> Any:
    return h.make_tensor_value_info(name, kind, shape)


def branch(result: str, prefix: str, *, named: bool, deep: int) -> Any:
    """Return a small network as a branch; its tensors have the same names in both branches."""

    def name(word: str) -> str:
        return f"{prefix}{word}" if named else ""

    def own(tensor: str) -> str:
        return f"{tensor}{deep}"

    tensors = {"w": floats(4, 3, 3, 3), "b": floats(4), "m": floats(144, 5)}
    weights = [nh.from_array(tensor, own(word)) for word, tensor in tensors.items()]
    nodes = [
        h.make_node("Conv", ["x", own("w"), own("b")], [own("c")], name=name("conv"), pads=[1, 1, 1, 1]),
        h.make_node("Relu", [own("c")], [own("a")], name=name("relu")),
        h.make_node("Flatten", [own("a")], [own("f")], name=name("flat")),
        h.make_node("MatMul", [own("f"), own("m")], [own("p")], name=name("product")),
        h.make_node("Sigmoid", [own("p")], [result], name=name("activation")),
    ]
    if deep:
        inner = [branch(f"{result}_{word}", f"{prefix}{word}_", named=named, deep=deep - 1) for word in ("a", "b")]
        nodes[-1] = h.make_node(
            "If", ["cond"], [result], name=name("deeper"), then_branch=inner[0], else_branch=inner[1]
        )
    return h.make_graph(nodes, f"{result}_graph", [], [value(result, None)], weights)


def network(*, named: bool = True, alike: bool = False, deep: int = 0, passed_on: bool = True) -> Any:
    """Return a model whose whole network is in an If, as exporters write voice activity detectors."""
    prefixes = ("", "") if alike else ("then_", "else_")
    branches = {
        "then_branch": branch("t", prefixes[0], named=named, deep=deep),
        "else_branch": branch("e", prefixes[1], named=named, deep=deep),
    }
    last = "Identity" if passed_on else "Neg"  # an Identity makes ONNX Runtime rename the outputs of the If
    nodes = [
        h.make_node("Equal", ["rate", "fast"], ["cond"], name="equal"),
        h.make_node("If", ["cond"], ["out"], name="if" if named else "", **branches),
        h.make_node(last, ["out"], ["y"], name="last"),
    ]
    inputs = [value("x", [1, 3, 6, 6]), value("rate", [], T.INT64)]
    graph = h.make_graph(nodes, "g", inputs, [value("y", None)], [nh.from_array(np.int64(16000), "fast")])
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 16)], ir_version=8)


def loop() -> Any:
    nodes = [
        h.make_node("MatMul", ["h", "w"], ["m"], name="product"),
        h.make_node("Tanh", ["m"], ["n"], name="activation"),
        h.make_node("Identity", ["go"], ["on"], name="condition"),
    ]
    read = [value("i", [], T.INT64), value("go", [], T.BOOL), value("h", [1, 4])]
    body = h.make_graph(nodes, "body", read, [value("on", [], T.BOOL), value("n", [1, 4])])
    weights = {"w": floats(4, 4), "count": np.int64(5), "true": np.array(True)}
    tensors = [nh.from_array(weight, name) for name, weight in weights.items()]
    node = h.make_node("Loop", ["count", "true", "x"], ["y"], name="loop", body=body)
    graph = h.make_graph([node], "g", [value("x", [1, 4])], [value("y", [1, 4])], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 16)], ir_version=8)


def scan() -> Any:
    nodes = [
        h.make_node("MatMul", ["h", "w"], ["m"], name="product"),
        h.make_node("Add", ["m", "s"], ["n"], name="sum"),
        h.make_node("Tanh", ["n"], ["o"], name="activation"),
    ]
    read, written = [[value(name, [1, 4]) for name in names] for names in ("hs", "no")]
    body = h.make_graph(nodes, "body", read, written)
    tensors = [nh.from_array(floats(4, 4), "w"), nh.from_array(floats(1, 4), "h0")]
    node = h.make_node("Scan", ["h0", "x"], ["last", "y"], name="scan", body=body, num_scan_inputs=1)
    graph = h.make_graph([node], "g", [value("x", [5, 1, 4])], [value("y", [5, 1, 4])], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 16)], ir_version=8)


def explained(model: Any, engine: str, folder: Path, feeds: dict[str, Any]) -> tuple[Any, Any]:
    path = folder / "model.onnx"
    onnx.save(model, path)
    execution = {"engine": engine, "device": "cpu", "precision": "fp32"}
    with xrt.InferenceSession(path, policy={"mode": "strict", "execution": execution}) as session:
        return session, session.explain(feeds, runs=1)


def unit_of(report: Any, node: str) -> Any:
    (unit,) = [u for u in report.units if node in u.source_nodes]
    return unit


@pytest.mark.parametrize("rate", [16000, 8000])
@pytest.mark.parametrize("passed_on", [False, True])
@pytest.mark.parametrize("deep", [0, 1])
def test_the_branch_that_ran(rate: int, passed_on: bool, deep: int, tmp_path: Path) -> None:
    model = network(deep=deep, passed_on=passed_on)
    _, report = explained(model, "onnxruntime", tmp_path, {"x": floats(1, 3, 6, 6), "rate": np.int64(rate)})
    taken, other = ("then_", "else_") if rate == 16000 else ("else_", "then_")
    deeper = "a_" if rate == 16000 else "b_"
    prefixes = [taken] if not deep else [taken, f"{taken}{deeper}"]
    for prefix in prefixes:
        for word in INNER[: -1 if deep and prefix == taken else None]:
            unit = unit_of(report, f"{prefix}{word}")
            assert (unit.relation in ("exact", "fused"), unit.time is not None, unit.device) == (True, True, "cpu")
            assert unit.precision_run == "fp32"
    for word in INNER[:4]:
        unit = unit_of(report, f"{other}{word}")
        assert (unit.time, unit.status) == (None, "unobservable")
        assert unit.relation != "folded"
    assert report.honoured
    assert not report.partial
    ran = [u for u in report.units if u.time is not None and u.relation not in ("inserted", "folded")]
    (device,) = [o for o in report.observations if o.key == "execution.device"]
    assert device.observed == f"cpu ({len(ran)} of {len(ran)} units)"


@pytest.mark.parametrize("rate", [16000, 8000])
@pytest.mark.parametrize(("named", "alike"), [(False, False), (True, True)])
def test_branches_without_names_of_their_own(rate: int, named: bool, alike: bool, tmp_path: Path) -> None:
    model = network(named=named, alike=alike)
    feeds = {"x": floats(1, 3, 6, 6), "rate": np.int64(rate)}
    session, report = explained(model, "onnxruntime", tmp_path, feeds)
    taken = "then_branch" if rate == 16000 else "else_branch"
    for node in session.model.nodes:
        if node.graph:
            unit = unit_of(report, node.name)
            assert (unit.time is not None) == (taken in node.graph), (node, unit)
            assert unit.relation in ("exact", "fused")


@pytest.mark.parametrize(
    ("model", "feeds", "nodes"),
    [
        (loop, {"x": floats(1, 4)}, ("product", "activation", "condition")),
        (scan, {"x": floats(5, 1, 4)}, ("product", "sum", "activation")),
    ],
)
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_bodies(engine: str, model: Any, feeds: dict[str, Any], nodes: tuple[str, ...], tmp_path: Path) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    _, report = explained(model(), engine, tmp_path, feeds)
    wanted = ("opaque",) if engine == "openvino" else ("exact", "fused")
    for node in nodes:
        unit = unit_of(report, node)
        assert unit.relation in wanted
        assert unit.time is not None or engine == "openvino"  # it does not tell less than a microsecond
    assert report.honoured


def test_nodes_that_cannot_be_found_are_opaque() -> None:
    """The optimized graph is of another model: nothing in it stands for the nodes of the source."""
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent
    from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units

    source, other = loop(), loop()
    body = other.graph.node[0].attribute[0].g
    for node in body.node:
        node.name = f"new_{node.name}"
        node.input[:] = [f"new_{name}" if name not in ("w", "i", "go", "h") else name for name in node.input]
        node.output[:] = [f"new_{name}" for name in node.output]
        node.op_type = {"MatMul": "FusedMatMul", "Tanh": "FusedTanh"}.get(node.op_type, node.op_type)
    for one in body.output:
        one.name = f"new_{one.name}"
    events = [
        NodeEvent(name=node.name, index=i, op=node.op_type, provider="CPUExecutionProvider", time_us=1.0, order=i)
        for i, node in enumerate(body.node)
    ]
    joined = attribute_units(source, other, events, None)
    lost = [u for u in joined.units if "activation" in u.source_nodes or "product" in u.source_nodes]
    assert joined.partial
    assert {(u.relation, u.status) for u in lost} == {("opaque", "unobservable")}
    assert {u.relation for u in joined.units if u.id in ("new_product", "new_activation")} == {"opaque"}
