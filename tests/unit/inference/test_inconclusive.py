# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Accuracy probes that compare no value: inconclusive in the report, the headline, JSON, `compare` and the CLI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime as xrt
from xpuruntime.evidence.tolerances import TOLERANCES, compare_within

if TYPE_CHECKING:
    from pathlib import Path

ACCURACY = {"cosine": 0.999, "rtol": 0.01}
EXECUTION = {"engine": "onnxruntime", "device": "cpu"}


def saved(path: Path, nodes: list[Any], outputs: list[Any], constants: dict[str, Any]) -> Path:
    inputs = [h.make_tensor_value_info("x", T.FLOAT, ["batch", "samples"])]
    weights = [nh.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = h.make_graph(nodes, "g", inputs, outputs, weights)
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    return path


def value(name: str, kind: int = T.FLOAT) -> Any:
    return h.make_tensor_value_info(name, kind, [None, None])


@pytest.fixture
def framed(tmp_path: Path) -> Path:
    """Drop the first 64 samples, then compute what overflows in fp16: made-up inputs are shorter than that."""
    nodes = [
        h.make_node("Slice", ["x", "start", "end", "axis"], ["frame"], name="drop"),
        h.make_node("Mul", ["frame", "gain"], ["loud"], name="scale"),
        h.make_node("Mul", ["loud", "back"], ["y"], name="back"),
    ]
    constants: dict[str, Any] = {name: np.int64([at]) for name, at in (("start", 64), ("end", 2**31), ("axis", 1))}
    constants |= {"gain": np.float32(1e6), "back": np.float32(1e-6)}
    return saved(tmp_path / "framed.onnx", nodes, [value("y")], constants)


def log_of_negative(op: str) -> list[Any]:
    return [
        h.make_node("Abs", ["x"], ["a"], name="a"),
        h.make_node("Neg", ["a"], ["n"], name="n"),
        h.make_node(op, ["n"], ["y"], name="y"),
    ]


SILENT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "empty": (
        [h.make_node("Slice", ["x", "big", "end", "one"], ["y"], name="y")],
        {"big": np.int64([4096]), "end": np.int64([9000]), "one": np.int64([1])},
    ),
    "nan": (log_of_negative("Sqrt"), {}),
    "zero": (log_of_negative("Relu"), {}),
    "infinite": ([h.make_node("Div", ["x", "zero"], ["y"], name="y")], {"zero": np.float32(0)}),
}


def statuses(report: Any) -> dict[str, str]:
    return {observation.key: observation.status for observation in report.observations}


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_to_compare_is_inconclusive(kind: str, tmp_path: Path) -> None:
    nodes, constants = SILENT[kind]
    model = saved(tmp_path / "silent.onnx", nodes, [value("y")], constants)
    with pytest.warns(xrt.XpuRuntimeWarning, match="inconclusive"):
        session = xrt.InferenceSession(model, policy={"execution": EXECUTION, "accuracy": ACCURACY})
    with session:
        report = session.explain(runs=1)
    found = statuses(report)
    assert found["accuracy.rtol"] == found["accuracy.cosine"] == "inconclusive"
    assert (report.honoured, report.headline) == (False, "2 keys inconclusive")
    plain = report.to_dict()
    assert (plain["honoured"], plain["headline"]) == (False, "2 keys inconclusive")
    assert xrt.Report.load(report.save(tmp_path / "report.json")) == report
    assert "inconclusive" in str(report)
    assert "inconclusive" in report.to_html()


def test_one_silent_output_of_two_is_enough(tmp_path: Path) -> None:
    nodes = [h.make_node("Relu", ["x"], ["z"], name="z"), *SILENT["nan"][0]]
    model = saved(tmp_path / "two.onnx", nodes, [value("z"), value("y")], {})
    with pytest.warns(xrt.XpuRuntimeWarning, match="other than zero in 'y'"):
        session = xrt.InferenceSession(model, policy={"execution": EXECUTION, "accuracy": ACCURACY})
    with session:
        assert statuses(session.explain(runs=1))["accuracy.rtol"] == "inconclusive"


@pytest.mark.parametrize("op", ["ArgMax", "ReduceSum", "IsNaN"])
def test_a_cosine_of_what_has_none_is_inconclusive_and_the_rest_is_not(op: str, tmp_path: Path) -> None:
    more = {"axis": 1} if op == "ArgMax" else {}
    kind = {"ArgMax": T.INT64, "IsNaN": T.BOOL}.get(op, T.FLOAT)
    model = saved(tmp_path / "m.onnx", [h.make_node(op, ["x"], ["y"], name="y", **more)], [value("y", kind)], {})
    with xrt.InferenceSession(model, policy={"execution": EXECUTION, "accuracy": ACCURACY}) as session:
        found = statuses(session.explain({"x": np.float32([[1, 2, 3]])}, runs=1))
    assert (found["accuracy.cosine"], found["accuracy.rtol"]) == ("inconclusive", "honoured")


def test_an_rtol_that_lets_every_element_differ_judges_no_integers(tmp_path: Path) -> None:
    model = saved(tmp_path / "m.onnx", [h.make_node("ArgMax", ["x"], ["y"], axis=1)], [value("y", T.INT64)], {})
    with pytest.warns(xrt.XpuRuntimeWarning, match="rtol 1 lets every element differ"):
        session = xrt.InferenceSession(model, policy={"execution": EXECUTION, "accuracy": {"rtol": 1.0}})
    with session:
        assert statuses(session.explain(runs=1))["accuracy.rtol"] == "inconclusive"


def test_inputs_of_explain_decide_what_the_probe_could_not(framed: Path) -> None:
    long = {"x": np.random.default_rng(0).standard_normal((1, 576)).astype(np.float32)}
    for precision, expected in (("fp32", "honoured"), ("fp16", "substituted")):
        policy = {"execution": {**EXECUTION, "precision": precision}, "accuracy": ACCURACY}
        with pytest.warns(xrt.XpuRuntimeWarning):
            session = xrt.InferenceSession(framed, policy=policy)
        with session:
            report = session.explain(long, runs=1)
            got = session.run(long)["y"]
        true = long["x"][:, 64:] * np.float32(1e6) * np.float32(1e-6)
        wrong = np.abs(got - true).max() > ACCURACY["rtol"] * np.abs(true).max()
        assert wrong == (expected == "substituted")
        assert statuses(report)["accuracy.rtol"] == expected, report.observations


def test_a_comparison_of_engines_does_not_agree_on_nothing(tmp_path: Path) -> None:
    model = saved(tmp_path / "nan.onnx", SILENT["nan"][0], [value("y")], {})
    engines = xrt.compare_engines(model, ["onnxruntime"], device="cpu", runs=1)
    assert [row.status for row in engines.rows] == ["inconclusive"]
    assert (engines.agreed, engines.headline) == (False, "the engine is inconclusive")


def test_a_zero_reference_still_finds_what_is_not_zero() -> None:
    result = compare_within({"y": np.zeros(3)}, {"y": np.ones(3)}, TOLERANCES["fp32"])
    assert not result.passed
    assert result.inconclusive is None
