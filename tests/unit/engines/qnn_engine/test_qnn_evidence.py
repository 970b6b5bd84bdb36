# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What ran, in nodes of the source model, with cycles and types that QNN itself reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from qnn_models import array, calibration, open_on

import xpuruntime as xrt
from xpuruntime.engines.qnn.observing.records import (
    Operation,
    OperationMapping,
    SessionTrace,
    median_cycles,
    read_cycles,
)
from xpuruntime.engines.qnn.observing.units import join_units
from xpuruntime.testing import models

pytest.importorskip("onnxruntime_qnn")


def _accounted(report: xrt.Report, session: xrt.InferenceSession) -> None:
    told = sorted(node for unit in report.units for node in unit.source_nodes)
    assert told == sorted(node.name for node in session.model.nodes)


def test_a_float_model(tmp_path: Path) -> None:
    path = models.save(models.conv(batch=1), tmp_path)
    with open_on(path, precision="fp16") as session:
        report = session.explain(runs=2)
        _accounted(report, session)
    units = {unit.source_nodes: unit for unit in report.units if unit.source_nodes}
    conv = units[("conv2",)]
    assert (conv.op, conv.relation, conv.layout, conv.provider) == ("Conv2d", "exact", "nhwc", "QNNExecutionProvider")
    assert (conv.precision_requested, conv.precision_run, conv.outputs) == ("fp16", "fp16", ("c2",))
    assert (conv.kernel, conv.kernel_source) == (None, "unknown")
    assert conv.time is not None
    assert (conv.time.unit, conv.time.kind, conv.time.runs) == ("cycles", "simulated", 2)
    assert conv.time.value > 0
    inserted = {unit.op for unit in report.units if unit.relation == "inserted"}
    assert inserted == {"Cast", "Transpose", "Input", "Output"}
    kinds = {boundary.kind for boundary in report.boundaries}
    assert kinds == {"copy", "cast", "layout"}
    assert report.honoured, report.headline
    assert not report.partial
    assert any("simulated" in note for note in report.notes)


def test_a_quantized_model(tmp_path: Path) -> None:
    """A model that came quantized: Q and DQ are in the operation that computes with them."""
    pytest.importorskip("onnxruntime.quantization")
    from xpuruntime.engines.model import inspect_model
    from xpuruntime.engines.quantization import Calibration, quantize

    path = models.save(models.conv(batch=1), tmp_path)
    info = inspect_model(path)
    made = quantize(info, Calibration.of(calibration("x", (1, 3, 32, 32)), info), "qnn")
    quantized = tmp_path / "quantized.onnx"
    quantized.write_bytes(made.data)
    with open_on(quantized) as session:
        report = session.explain(runs=1)
        _accounted(report, session)
    conv = next(unit for unit in report.units if "conv2" in unit.source_nodes)
    assert conv.relation == "fused"
    assert conv.precision_run == "uint8"
    ops = {node.name: node.op for node in session.model.nodes}
    assert sorted({ops[name] for name in conv.source_nodes}) >= ["Conv", "DequantizeLinear", "QuantizeLinear"]
    assert report.honoured, report.headline


def test_bf16_is_read_back(tmp_path: Path) -> None:
    path = models.save(models.mlp(batch=4), tmp_path)
    x = array((4, 64))
    with open_on(path, "sc8480xp", precision="bf16") as session:
        want = xrt.InferenceSession(path, device="cpu").run({"x": x})["y"]
        assert np.abs(session.run({"x": x})["y"] - want).max() < 0.02 * np.abs(want).max()
        report = session.explain(runs=1)
    assert {unit.precision_run for unit in report.units if unit.source_nodes} == {"bf16"}
    assert report.honoured, report.headline


def test_nodes_that_onnxruntime_removes_first(tmp_path: Path) -> None:
    """Constants are folded and duplicates dropped before QNN sees the graph: each still has its place."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Reshape", ["x", "s"], ["r"], name="reshape"),
        helper.make_node("MatMul", ["r", "w"], ["a"], name="mm"),
        helper.make_node("Add", ["a", "b"], ["c"], name="bias"),
        helper.make_node("MatMul", ["r", "w"], ["twin"], name="twin"),
        helper.make_node("Add", ["c", "twin"], ["d"], name="sum"),
        helper.make_node("Identity", ["d"], ["y"], name="identity"),
    ]
    weights = [
        numpy_helper.from_array(array((16, 16)), "w"),
        numpy_helper.from_array(array((16,)), "b"),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [4, 16])], [value("y", TensorProto.FLOAT, [4, 16])], weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with open_on(models.save(model, tmp_path)) as session:
        report = session.explain(runs=1)
        _accounted(report, session)
    assert not report.partial, report.notes
    folded = {name for unit in report.units if unit.relation == "folded" for name in unit.source_nodes}
    assert "shape" in folded


def _recorded(mappings: tuple[OperationMapping, ...], operations: dict[str, Operation] | None = None) -> SessionTrace:
    nodes = tuple(
        {"name": node.name, "op": node.op_type, "inputs": list(node.input), "outputs": list(node.output)}
        for node in models.mlp(batch=4).graph.node
    )
    return SessionTrace(mappings=mappings, nodes=nodes[::-1], operations=operations or {})


def _join(recorded: SessionTrace, model: onnx.ModelProto | None = None) -> Any:
    return join_units(model or models.mlp(batch=4), recorded, (), device="npu", precision="model")


def test_one_node_as_two_operations() -> None:
    """The node belongs to the operation that has its name; the other one serves it."""
    mappings = (
        OperationMapping(operation="mm1_helper", op="Reshape", nodes=("mm1",)),
        OperationMapping(operation="mm1", op="FullyConnected", nodes=("mm1",)),
        OperationMapping(operation="tail", op="Fused", nodes=("relu", "mm2")),
    )
    units, _, partial = _join(_recorded(mappings))
    assert [(u.id, u.source_nodes, u.serves) for u in units] == [
        ("mm1_helper", (), ("mm1",)),
        ("mm1", ("mm1",), ()),
        ("tail", ("relu", "mm2"), ()),
    ]
    assert units[2].outputs == ("y",)
    assert not partial


def test_nodes_without_an_operation_are_told() -> None:
    units, _, _ = _join(_recorded((OperationMapping(operation="mm1", op="FullyConnected", nodes=("mm1",)),)))
    left = {u.source_nodes: u.placement_reason for u in units if u.relation == "folded"}
    assert set(left) == {("relu",), ("mm2",)}
    assert all("names no operation" in str(reason) for reason in left.values())


def test_nothing_recorded_is_partial_and_still_complete() -> None:
    units, notes, partial = _join(SessionTrace(notes=("qnn_op_trace.json of QNN is missing",)))
    assert partial
    assert sorted(name for unit in units for name in unit.source_nodes) == ["mm1", "mm2", "relu"]
    assert any("missing" in note for note in notes)


def test_a_type_that_is_not_the_one_asked_for_is_substituted() -> None:
    operation = Operation(name="mm1", op="FullyConnected", read="fp16", written="fp16")
    recorded = _recorded((OperationMapping(operation="mm1", op="FullyConnected", nodes=("mm1",)),), {"mm1": operation})
    units, _, _ = _join(recorded)
    assert (units[0].precision_requested, units[0].precision_run, units[0].status) == ("fp32", "fp16", "substituted")


_PROFILE = """\
Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier,ONNX Source Ops
0,FINALIZE,12039,US,BACKEND,ROOT,QNN (finalize) time,
0,NODE,1516,CYCLES,BACKEND,SUB-EVENT,Input OpId_2 (cycles),
0,NODE,9000,CYCLES,BACKEND,SUB-EVENT,mm,1:OpId_22 (cycles),mm,1;relu
0,NODE,7,US,BACKEND,SUB-EVENT,mm,1:OpId_22 (cycles),mm,1
0,NODE,30,CYCLES,BACKEND,SUB-EVENT,relu:OpId_3:OpId_26 (cycles),relu
0,NODE,100,CYCLES,BACKEND,SUB-EVENT,mm,1:OpId_22 (cycles),mm,1;relu
0,NODE,200,CYCLES,BACKEND,SUB-EVENT,mm,1:OpId_22 (cycles),mm,1;relu
0,NODE,5
"""


def test_the_profile_is_read_with_commas_and_colons_in_names(tmp_path: Path) -> None:
    (tmp_path / "profile.csv").write_text(_PROFILE)
    cycles, problem = read_cycles(tmp_path)
    assert problem is None
    assert cycles == {"Input": [1516], "mm,1": [9000, 100, 200], "relu:OpId_3": [30]}


def test_a_missing_or_empty_profile_is_said(tmp_path: Path) -> None:
    assert read_cycles(tmp_path)[1] == "QNN wrote no profile (No such file or directory)"
    (tmp_path / "profile.csv").write_text("Msg Timestamp\n")
    assert read_cycles(tmp_path) == ({}, "QNN's profile holds no operations")


def test_the_cold_run_is_left_out() -> None:
    assert median_cycles([9000, 100, 200, 300], 3) == (200.0, 3)
    assert median_cycles([9000], 3) == (9000.0, 1)
    # Two partitions with an operation of one name: their sum is one run's.
    assert median_cycles([9000, 9000, 10, 1, 20, 2], 2) == (16.5, 2)
