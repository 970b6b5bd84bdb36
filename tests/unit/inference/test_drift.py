# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How far each layer of a model is from the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from fault_engine import FaultEngine
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.inference import comparison

if TYPE_CHECKING:
    from pathlib import Path

MODEL = xrt.demo_model_path()
LAYERS = [node.name for node in inspect_model(MODEL).nodes if node.op != "Constant"]


def drift_of(engine: FaultEngine, model: object = MODEL, **options: object) -> comparison.DriftReport:
    table = xrt.compare_engines(
        model, ["fault"], device="cpu", registry=engine.registry(), runs=1, layers=True, search=False, **options
    )
    (row,) = table.rows
    assert table.layers
    assert row.drift is not None
    return row.drift


def with_a_sequence(path: Path) -> Path:
    """Write a model one of whose nodes makes no plain array."""
    nodes = [
        helper.make_node("Relu", ["x"], ["kept"], "keep"),
        helper.make_node("SequenceConstruct", ["kept", "kept"], ["pair"], "pair"),
        helper.make_node("ConcatFromSequence", ["pair"], ["y"], "join", axis=0),
    ]
    graph = helper.make_graph(
        nodes,
        "sequence",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("node", LAYERS)
def test_a_planted_fault_is_the_first_layer_out_of_tolerance(node: str) -> None:
    drift = drift_of(FaultEngine(node))
    assert [layer.name for layer in drift.layers] == LAYERS
    assert drift.first is not None
    assert drift.layers[drift.first].name == node
    assert all(layer.figures.max_abs == 0.0 for layer in drift.layers[: drift.first])
    assert drift.layers[drift.first].figures.max_abs == pytest.approx(3.0, rel=1e-4)
    assert f"the first out of tolerance is {node!r}" in str(drift)
    assert not drift.skipped


def test_the_engine_without_a_fault_drifts_nowhere() -> None:
    drift = drift_of(FaultEngine("no node"))
    assert (len(drift.layers), drift.first, drift.note) == (len(LAYERS), None, "")
    assert {layer.figures.max_rel for layer in drift.layers} == {0.0}
    assert str(drift) == f"{len(LAYERS)} layers measured, all within tolerance"


def test_errors_of_fp16_are_there_and_within_its_tolerance() -> None:
    table = xrt.compare_engines(MODEL, ["onnxruntime"], device="cpu", precision="fp16", runs=1, layers=True)
    (row,) = table.rows
    errors = [layer.figures.max_rel for layer in row.drift.layers]
    assert row.precision == "fp16"
    assert len(errors) == len(LAYERS)
    assert 1e-5 < max(errors) < row.tolerance.rtol
    assert row.drift.first is None
    assert [output.name for output in row.outputs] == ["logits"]


def test_a_tensor_that_is_hidden_hides_only_itself() -> None:
    hidden = inspect_model(MODEL).nodes[3]
    drift = drift_of(FaultEngine("conv1", hidden=lambda name: name == hidden.outputs[0]))
    assert [layer.name for layer in drift.layers] == [name for name in LAYERS if name != hidden.name]
    assert list(drift.skipped) == [hidden.name]
    assert "the model was refused with it as an output: one output is all it gives" in drift.skipped[hidden.name]
    assert "1 not measured" in str(drift)


def test_an_engine_that_gives_no_layer_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_REFUSALS", 6)
    engine = FaultEngine("conv1", hidden=lambda name: True)
    drift = drift_of(engine)
    assert [layer.figures.name for layer in drift.layers] in ([], ["logits"])
    assert any("not tried: the engine had refused 6 models" in reason for reason in drift.skipped.values())
    assert len(engine.seen) < 12


def test_a_fault_of_a_fusion_is_told() -> None:
    drift = drift_of(FaultEngine("conv2", alone=True))
    assert drift.first is None
    assert "The outputs are out of tolerance, and within it while layers are outputs too" in drift.note
    assert drift.note in str(drift)


def test_large_tensors_are_measured_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drift_of(FaultEngine("conv2"))
    monkeypatch.setattr(comparison, "_ELEMENTS", 1)
    engine = FaultEngine("conv2")
    parts = drift_of(engine)
    assert [layer.name for layer in parts.layers] == LAYERS
    assert parts.first == whole.first
    errors = [[layer.figures.max_rel for layer in drift.layers] for drift in (parts, whole)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4, abs=1e-6)
    assert len(engine.seen) > len(LAYERS)


@pytest.mark.parametrize(("by", "field"), [(np.nan, "nan"), (np.inf, "inf")])
def test_what_is_no_number_is_out_of_tolerance(by: float, field: str) -> None:
    drift = drift_of(FaultEngine("conv2", by=by))
    first = drift.layers[drift.first]
    assert (first.name, first.figures.passed) == ("conv2", False)
    assert getattr(first.figures, field) > 0
    assert first.figures.max_rel == 0.0


def test_what_is_no_array_is_skipped(tmp_path: Path) -> None:
    drift = drift_of(FaultEngine("join"), with_a_sequence(tmp_path / "sequence.onnx"))
    assert [layer.name for layer in drift.layers] == ["keep", "join"]
    assert drift.skipped == {"pair": "no plain array can be had of it"}
    assert drift.first == 1


def test_layers_are_not_measured_unasked_and_errors_of_others_are_notes() -> None:
    table = xrt.compare_engines(MODEL, ["onnxruntime"], device="cpu", runs=1)
    assert (table.layers, table.rows[0].drift) == (False, None)
    broken = FaultEngine("conv1", breaks=UnsupportedOperationError("no such thing", engine="fault"))
    table = xrt.compare_engines(MODEL, ["fault"], device="cpu", registry=broken.registry(), runs=1, layers=True)
    assert (table.rows[0].status, table.rows[0].drift) == ("failed", None)


@pytest.mark.parametrize(
    ("engines", "headline"),
    [
        (["onnxruntime"], "the engine agrees"),
        (["onnxruntime", "ort@cpu"], "all 2 engines agree"),
        (["null"], "the engine differs"),
        (["null", "onnxruntime"], "of 2 engines, 1 differs"),
        (["null", "null"], "of 2 engines, 2 differ"),
        (["ort@npu"], "nothing ran: every engine was rejected"),
    ],
)
def test_the_verdict_in_a_few_words(engines: list[str], headline: str) -> None:
    assert xrt.compare_engines(MODEL, engines, device="cpu", runs=1, search=False).headline == headline


def test_where_layers_are_measured_there_is_one_first_node() -> None:
    engines = xrt.compare_engines(xrt.demo_model_path(), ["null"], device="cpu", runs=1, layers=True)
    (row,) = engines.rows
    assert row.status == "differs"
    assert row.drift is not None
    assert row.drift.first is not None
    assert row.divergence is None
    assert any("not looked for by bisection: the layers were measured" in note for note in row.notes)
    assert str(engines).count("first") == 1
    (searched,) = xrt.compare_engines(xrt.demo_model_path(), ["null"], device="cpu", runs=1).rows
    assert searched.divergence is not None
