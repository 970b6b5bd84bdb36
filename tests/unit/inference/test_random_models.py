# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models that draw random numbers: their outputs are not compared, and everything that compares says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.evidence.tolerances import TOLERANCES, compare_within

if TYPE_CHECKING:
    from pathlib import Path

N = h.make_node
CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
NOISE = "'noise' (RandomNormalLike)"


def value(name: str, kind: int = T.FLOAT) -> Any:
    return h.make_tensor_value_info(name, kind, ["n", 4])


def built(nodes: list[Any], constants: dict[str, Any] | None = None, functions: Any = (), outputs: str = "y") -> Any:
    weights = [nh.from_array(np.asarray(constant), name) for name, constant in (constants or {}).items()]
    graph = h.make_graph(nodes, "g", [value("x")], [value(name) for name in outputs], weights)
    opsets = [h.make_opsetid("", 17), h.make_opsetid("local", 1)]
    return h.make_model(graph, opset_imports=opsets, ir_version=9, functions=list(functions))


def branch(name: str, *nodes: Any) -> Any:
    return h.make_graph([*nodes], name, [], [h.make_tensor_value_info(nodes[-1].output[0], T.FLOAT, None)])


def function(name: str, *nodes: Any) -> Any:
    opsets = [h.make_opsetid("", 17), h.make_opsetid("local", 1)]
    return h.make_function("local", name, ["a"], ["b"], [*nodes], opsets)


def dropout(*inputs: str) -> Any:
    return N("Dropout", ["x", *inputs], ["y"], name="drop")


IF = N(
    "If", ["yes"], ["y"], name="if",
    then_branch=branch("t", N("RandomNormalLike", ["x"], ["t"], name="noise")),
    else_branch=branch("e", N("Identity", ["x"], ["e"], name="same")),
)  # fmt: skip
HALF, YES, NO, ZERO = np.float32(0.5), np.bool_(1), np.bool_(0), np.float32(0)


@pytest.mark.parametrize(
    ("model", "drawn"),
    [
        (built([N("RandomNormalLike", ["x"], ["z"], name="noise"), N("Add", ["x", "z"], ["y"])]), NOISE),
        (built([N("RandomUniform", [], ["z"], shape=[4], name="u"), N("Add", ["x", "z"], "y")]), "'u' (RandomUniform)"),
        (built([N("Bernoulli", ["x"], ["y"], name="b", seed=1.0)]), "'b' (Bernoulli)"),
        (built([IF], {"yes": YES}), NOISE),
        (
            built([N("outer", ["x"], ["y"], domain="local", name="call")], None, [
                function("outer", N("inner", ["a"], ["b"], domain="local")),
                function("inner", N("RandomNormalLike", ["a"], ["b"])),
            ]),
            "'call' (outer)",
        ),
        (built([N("f", ["x"], ["y"], domain="local")], None, [function("f", N("Relu", ["a"], ["b"]))]), None),
        (built([dropout("half", "yes")], {"half": HALF, "yes": YES}), "'drop' (Dropout)"),
        (built([dropout("", "yes")], {"yes": YES}), "'drop' (Dropout)"),
        (built([dropout("half", "no")], {"half": HALF, "no": NO}), None),
        (built([N("Constant", [], ["no"], value=nh.from_array(NO)), dropout("half", "no")], {"half": HALF}), None),
        (built([dropout("zero", "yes")], {"zero": ZERO, "yes": YES}), None),
        (built([dropout()]), None),
        (built([N("RandomNormalLike", ["x"], ["z"]), N("Relu", ["x"], ["y"])]), None),
    ],
)  # fmt: skip
def test_the_outputs_that_depend_on_random_numbers_are_known(model: Any, drawn: str | None) -> None:
    assert inspect_bytes(model).random_outputs == ({} if drawn is None else {"y": drawn})


def test_a_constant_of_no_known_type_may_be_any_number() -> None:
    model = built([dropout("half", "no")], {"half": HALF, "no": NO})
    model.graph.initializer[1].data_type = 64
    assert inspect_bytes(model).random_outputs == {"y": "'drop' (Dropout)"}


def test_random_outputs_are_not_compared_and_the_others_are() -> None:
    left = {"y": np.zeros((1, 2), np.float32), "m": np.ones(3, np.float32)}
    right = {"y": np.ones((1, 9), np.float32), "m": np.ones(3, np.float32)}
    result = compare_within(left, right, TOLERANCES["fp32"], {"y": NOISE})
    assert result.passed
    assert result.inconclusive == f"nothing was compared: random numbers of node {NOISE} are in 'y'"
    assert not compare_within(left, {**right, "m": left["m"] * 2}, TOLERANCES["fp32"], {"y": NOISE}).passed
    assert not compare_within(left, {"m": right["m"]}, TOLERANCES["fp32"], {"y": NOISE}).passed


@pytest.fixture
def sampled(tmp_path: Path) -> str:
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    nodes = [
        N("MatMul", ["x", "w"], ["m"], name="mean"),
        N("RandomNormalLike", ["m"], ["z"], name="noise"),
        N("Add", ["m", "z"], ["y"], name="sample"),
    ]
    path = tmp_path / "sampled.onnx"
    onnx.save(built(nodes, {"w": weight}, outputs="ym"), path)
    return str(path)


@pytest.mark.filterwarnings("ignore::xpuruntime.XpuRuntimeWarning")
@pytest.mark.parametrize("more", [{"precision": "fp16"}, {"accuracy": {"rtol": 0.01}}])
def test_a_session_says_that_its_accuracy_cannot_be_judged(sampled: str, more: dict[str, Any]) -> None:
    policy = {**CPU, "accuracy": more.get("accuracy", {"rtol": 0.1})}
    with xrt.InferenceSession(sampled, policy=policy, precision=more.get("precision")) as session:
        assert any(f"{NOISE} are in 'y'. Fix: export the model with its random" in w for w in session.plan.warnings)
        x = {"x": np.ones((2, 4), np.float32)}
        row = next(observation for observation in session.explain(x).observations if observation.key == "accuracy.rtol")
    assert row.status == "inconclusive"
    assert NOISE in row.reason


def test_a_comparison_of_engines_names_the_node(sampled: str) -> None:
    (row,) = xrt.compare_engines(sampled, ["onnxruntime"], device="cpu", layers=True).rows
    assert row.status == "inconclusive"
    assert NOISE in row.reason
    assert row.drift is not None
    assert row.drift.first is None, row.drift


def test_a_lock_has_the_outputs_that_can_be_locked(sampled: str, tmp_path: Path) -> None:
    path = str(tmp_path / "sampled.lock")
    lock = xrt.lock(sampled, CPU, path)
    assert {output.name: output.grade for output in lock.lock.identity.outputs} == {"m": "bitwise", "y": "random"}
    with xrt.InferenceSession(sampled, lock=path) as session:
        row = next(observation for observation in session.explain().observations if observation.key == "execution.lock")
    assert row.status == "honoured"
    assert "'y' depend on random numbers, and are not compared" in row.reason
    result = xrt.verify(sampled, lock=path, only=["evidence", "accuracy", "audit"])
    assert not result.of("fail"), str(result)
    claims = {claim.id: claim for claim in result.claims}
    assert claims["accuracy.y"].verdict == "inconclusive"
    assert NOISE in claims["accuracy.y"].reason
    assert claims["accuracy.m"].verdict == claims["audit.same_work"].verdict == "pass"


def test_work_of_which_every_output_is_random_is_inconclusive(tmp_path: Path) -> None:
    onnx.save(built([N("RandomNormalLike", ["x"], ["y"], name="noise")]), tmp_path / "noise.onnx")
    result = xrt.verify(str(tmp_path / "noise.onnx"), CPU, only=["audit"])
    claim = next(claim for claim in result.claims if claim.id == "audit.same_work")
    assert claim.verdict == "inconclusive"
    assert NOISE in claim.reason


def test_a_search_refuses_what_it_cannot_judge(tmp_path: Path) -> None:
    onnx.save(built([N("RandomNormalLike", ["x"], ["y"], name="noise")]), tmp_path / "noise.onnx")
    with pytest.raises(xrt.InputError, match=r"random numbers of node 'noise'.*Fix: export the model with its random"):
        xrt.tune(str(tmp_path / "noise.onnx"), CPU, inputs="random", budget=5.0)
