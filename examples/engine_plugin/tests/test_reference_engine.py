# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The conformance suite of xpuruntime, and what is this engine's own. Install the package, then run pytest here."""
# ruff: noqa: ANN001, ANN003, ANN201, D101, D103

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.testing import EngineSuite, models


class TestConformance(EngineSuite):
    engine = "onnx-reference"
    device = "cpu"


@pytest.fixture
def mlp(tmp_path):
    return models.save(models.mlp(8), tmp_path)


def session(path, **asked):
    return xrt.InferenceSession(path, engine="onnx-reference", device="cpu", **asked)


def option(value):
    return {"execution": {"provider_options": {"onnx-reference": {"floating_point_errors": value}}}}


def test_auto_does_not_choose_it(mlp):
    plan = xrt.plan(mlp, device="cpu")
    assert plan.engine != "onnx-reference"
    assert "onnx-reference" not in [verdict.candidate.partition("@")[0] for verdict in plan.verdicts]


def test_the_demo_agrees_with_onnx_runtime():
    images, _ = xrt.demo_images()
    with session(xrt.demo_model_path()) as mine, xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as other:
        got, want = mine.run({"image": images[:4]})["logits"], other.run({"image": images[:4]})["logits"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_options(mlp):
    x = np.full((1, 8), 3e38, np.float32)
    with session(mlp, policy=option("ignore")) as quiet:
        quiet.run({"x": x})
    with session(mlp, policy={**option("raise"), "mode": "strict"}) as loud:
        with pytest.raises(xrt.EngineError, match=r"overflow|invalid value"):
            loud.run({"x": x})
        loud.run({"x": np.ones((1, 8), np.float32)})
        report = loud.explain({"x": np.ones((1, 8), np.float32)}, runs=1)
    key = "execution.provider_options.onnx-reference.floating_point_errors"
    assert {seen.key: (seen.observed, seen.status) for seen in report.observations}[key] == ("raise", "honoured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floating_point_error": "raise"}, r"unknown option 'floating_point_error'; did you mean"),
        ({"floating_point_errors": "warn"}, r"'warn' is not one of 'ignore', 'raise'"),
    ],
)
def test_options_that_are_refused(mlp, options, message):
    with pytest.raises(xrt.PolicyError, match=message):
        session(mlp, policy={"execution": {"provider_options": {"onnx-reference": options}}})


@pytest.mark.parametrize(("asked", "message"), [({"device": "cuda:0"}, "NumPy"), ({"precision": "bf16"}, "bf16")])
def test_what_it_cannot_do_is_rejected_in_the_plan(mlp, asked, message):
    with pytest.raises(xrt.UnsupportedOperationError, match=message):
        xrt.plan(mlp, engine="onnx-reference", **asked)


def test_every_node_of_a_branch_is_accounted_for(tmp_path):
    branches = {}
    for name, op in (("then_branch", "Abs"), ("else_branch", "Neg")):
        out = helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, [2])
        branches[name] = helper.make_graph([helper.make_node(op, ["x"], [f"{op}_out"])], op, [], [out])
    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["chosen"], **branches), helper.make_node("Relu", ["chosen"], ["y"])],
        "branches",
        [
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "if.onnx")
    feeds = {"flag": np.array(False), "x": np.array([1, -2], np.float32)}
    with session(tmp_path / "if.onnx") as mine:
        np.testing.assert_array_equal(mine.run(feeds)["y"], [0, 2])
        report = mine.explain(feeds, runs=1)
        told = sorted(name for unit in report.units for name in unit.source_nodes)
        assert told == sorted(node.name for node in mine.model.nodes)
        assert len(told) == 4
    assert [unit.relation for unit in report.units] == ["opaque", "exact"]
    assert report.units[1].kernel == "onnx.reference.ops.op_relu.Relu"
    assert report.units[1].precision_run == "fp32"


def test_a_result_is_not_the_callers_input(tmp_path):
    path = models.save(models.identity("float32"), tmp_path)
    x = np.ones((2, 3), np.float32)
    with session(path) as mine:
        assert not np.may_share_memory(mine.run({"x": x})["y"], x)


def test_an_operator_it_does_not_have(tmp_path):
    node = helper.make_node("Attention_of_tomorrow", ["x"], ["y"], domain="com.example")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    made = helper.make_model(
        helper.make_graph([node], "custom", value[:1], value[1:]),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)],
        ir_version=8,
    )
    onnx.save(made, tmp_path / "custom.onnx")
    with pytest.raises(xrt.UnsupportedOperationError, match=r"com\.example: Attention_of_tomorrow"):
        session(tmp_path / "custom.onnx")
