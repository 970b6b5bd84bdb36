# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines compared with each other, and the first node whose output differs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fault_engine import FaultEngine

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.testing import models

MODEL = xrt.demo_model_path()


def row_of(engine: FaultEngine, model: object = MODEL, **options: object) -> object:
    table = xrt.compare_engines(model, ["fault"], device="cpu", registry=engine.registry(), runs=1, **options)
    (row,) = table.rows
    return row


def test_every_engine_has_a_row() -> None:
    table = xrt.compare_engines(MODEL, ["onnxruntime", "ort@cpu", "null", "ort@npu"], device="cpu", runs=2)
    assert [row.status for row in table.rows] == ["agrees", "agrees", "differs", "rejected"]
    assert [row.engine for row in table.rows] == ["onnxruntime", "onnxruntime", "null", "ort"]
    first, _, zeros, elsewhere = table.rows
    assert first.max_abs == 0.0
    assert first.cosine == pytest.approx(1.0)
    assert first.median_us is not None
    assert first.median_us > 0
    assert zeros.max_rel == pytest.approx(1.0)
    assert "npu" in elsewhere.reason
    assert elsewhere.median_us is None
    assert not table.agreed
    assert xrt.compare_engines(MODEL, ["onnxruntime", "ort@npu"], device="cpu", runs=1).agreed
    assert not xrt.compare_engines(MODEL, ["ort@npu"], device="cpu").agreed


def test_a_name_that_no_engine_has_is_refused_before_anything_runs() -> None:
    with pytest.raises(xrt.InputError, match=r"unknown engine 'onnxruntme'; .* Fix: write onnxruntime"):
        xrt.compare_engines(MODEL, ["null", "onnxruntme@cpu"])


def test_the_table_as_text_and_json() -> None:
    table = xrt.compare_engines(MODEL, ["onnxruntime", "null"], device="cpu", runs=1)
    plain = msgspec.json.decode(table.to_json())
    assert plain["schema"] == "xpuruntime.comparison/1"
    assert plain["agreed"] is False
    assert plain["reference"] == "onnxruntime.cpu.fp32"
    assert plain["rows"][1]["divergence"]["nodes"]
    assert "null@cpu (model): differs: output 'logits' is out of tolerance" in str(table)
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(table)
    console.file.close()
    text = console.export_text()
    assert "onnxruntime@cpu" in text
    assert "first divergence" in text


NODES = [node.name for node in inspect_model(MODEL).nodes]


@pytest.mark.parametrize("node", NODES[::3])
def test_a_planted_fault_is_found(node: str) -> None:
    """Whichever node of the model computes something wrong, it is named."""
    row = row_of(FaultEngine(node))
    assert row.status == "differs"
    assert row.divergence.nodes == (node,)
    assert row.divergence.figures.max_abs > 0
    assert row.divergence.steps <= 6
    assert row.divergence.note == ""


@pytest.mark.parametrize("node", ["conv1", "conv2", "add", "fc"])
def test_a_fault_on_one_of_two_branches_is_found(tmp_path: object, node: str) -> None:
    model = models.save(models.conv(), tmp_path)
    names = [node.name for node in inspect_model(model).nodes]
    assert node in names, names
    assert row_of(FaultEngine(node), model).divergence.nodes == (node,)


def test_a_fault_that_does_not_reach_an_output_is_none(tmp_path: object) -> None:
    assert row_of(FaultEngine("nowhere")).status == "agrees"


def test_an_engine_that_refuses_more_outputs_gets_a_range() -> None:
    row = row_of(FaultEngine("conv2", hidden=lambda name: True))
    divergence = row.divergence
    assert divergence.nodes == tuple(NODES)
    assert "They cannot be distinguished: the model was refused with more outputs: one output is all it gives" in str(
        divergence
    )
    assert divergence.output == "logits"


def test_where_some_tensors_cannot_be_had_the_range_is_as_small_as_can_be() -> None:
    nodes = {node.name: node for node in inspect_model(MODEL).nodes}
    at = NODES.index("conv2")
    closed = {name for node in NODES[at - 1 : at + 2] for name in nodes[node].outputs}
    row = row_of(FaultEngine("conv2", hidden=lambda name: name in closed))
    assert row.divergence.nodes == tuple(NODES[at - 1 : at + 3])


def test_a_fault_of_fusion_only_is_said_to_be_that() -> None:
    """The fault is gone as soon as a tensor in between is asked for."""
    row = row_of(FaultEngine("conv2", alone=True))
    assert len(row.divergence.nodes) > 1
    assert "so it fused these nodes" in row.divergence.note


def test_the_search_can_be_left_out() -> None:
    row = row_of(FaultEngine("conv2"), search=False)
    assert row.status == "differs"
    assert row.divergence is None


def test_an_engine_that_breaks_is_a_row() -> None:
    row = row_of(FaultEngine("conv2", breaks=ZeroDivisionError("by design")))
    assert row.status == "failed"
    assert row.reason == "ZeroDivisionError: by design"
    row = row_of(FaultEngine("conv2", breaks=xrt.EngineError("no more memory")))
    assert (row.status, row.reason) == ("failed", "no more memory")


def test_the_tolerance_is_that_of_the_policy() -> None:
    wide = {"accuracy": {"rtol": 10.0, "cosine": 0.0}}
    assert row_of(FaultEngine("conv2"), policy=wide).status == "agrees"
    row = row_of(FaultEngine("nowhere"), policy={"accuracy": {"rtol": 1e-3}})
    assert row.tolerance.rtol == 1e-3


def test_inputs_and_shapes_are_the_same_for_all() -> None:
    engine = FaultEngine("nowhere")
    images = {"image": xrt.demo_images()[0][:3]}
    table = xrt.compare_engines(MODEL, ["fault"], device="cpu", inputs=images, registry=engine.registry(), runs=1)
    assert table.inputs == "given"
    assert {run["image"].shape for run in engine.seen} == {(3, 1, 8, 8)}
    engine = FaultEngine("nowhere")
    row_of(engine, policy={"execution": {"shapes": {"image": [7, 1, 8, 8]}}})
    assert {run["image"].shape for run in engine.seen} == {(7, 1, 8, 8)}


def test_nodes_in_an_if_are_found_as_that_if(tmp_path: object) -> None:
    from onnx import TensorProto, helper

    def branch(name: str, op: str) -> object:
        nodes = [helper.make_node(op, ["d"], [f"{name}_y"], name=f"{name}_node")]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)])

    nodes = [
        helper.make_node("Add", ["x", "x"], ["d"], name="double"),
        helper.make_node(
            "If", ["c"], ["z"], name="choose", then_branch=branch("t", "Exp"), else_branch=branch("e", "Neg")
        ),
        helper.make_node("Neg", ["z"], ["y"], name="last"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])])
    path = models.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path)
    for node in ("double", "choose", "last"):
        assert row_of(FaultEngine(node), path).divergence.nodes == (node,)


def test_what_is_asked_wrongly() -> None:
    for engines in ([], "onnxruntime"):
        with pytest.raises(xrt.InputError, match="engines is a list of names"):
            xrt.compare_engines(MODEL, engines)
    for name in ("@cpu", "onnxruntime@", ""):
        with pytest.raises(xrt.InputError, match="is no engine"):
            xrt.compare_engines(MODEL, [name])
    with pytest.raises(xrt.InputError, match="runs must be at least 1"):
        xrt.compare_engines(MODEL, ["null"], runs=0)
    with pytest.raises(xrt.InputError, match="image"):
        xrt.compare_engines(MODEL, ["null"], inputs={"picture": np.zeros(1)})
    with pytest.raises(xrt.ModelError):
        xrt.compare_engines("nothing.onnx", ["null"])
