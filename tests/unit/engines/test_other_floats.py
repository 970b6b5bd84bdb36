# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models that state floating-point types of their own: fp32 in the plan, and in the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml
from onnx import parser

import xpuruntime as xrt

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[2, 4] x) => (float[2, 4] y)'
#: Ways to come by another type: a cast, a constant, a weight; and models in fp32 that cast between other types.
OTHERS = {
    "cast": "{ d = Cast<to = 11>(x) e = Softmax(d) y = Cast<to = 1>(e) }",
    "constant": "{ c = Constant<value = double[1] {2.0}>() d = Cast<to = 11>(x) e = Mul(d, c) y = Cast<to = 1>(e) }",
    "weight": "<double[1] w = {2.0}> { d = Cast<to = 11>(x) e = Mul(d, w) y = Cast<to = 1>(e) }",
    "fp16": "{ d = Cast<to = 10>(x) e = Relu(d) y = Cast<to = 1>(e) }",
    "inside": "{ d = Cast<to = 11>(x) e = Exp(d) f = Cast<to = 1>(e) y = Relu(f) }",
}
PLAIN = {
    "fp32": "{ d = Softmax(x) y = Relu(d) }",
    "integers": "{ d = Cast<to = 7>(x) e = Add(d, d) y = Cast<to = 1>(e) }",
}
X = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)}


def write(body: str, folder: Path) -> Path:
    model = parser.parse_model(HEAD + body)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def policy(precision: str, engine: str = "onnxruntime", mode: str = "strict") -> dict[str, Any]:
    return {"mode": mode, "execution": {"engine": engine, "device": "cpu", "precision": precision}}


@pytest.mark.parametrize("name", OTHERS)
def test_fp32_is_refused_under_strict_where_the_model_states_another_type(name: str, tmp_path: Path) -> None:
    path = write(OTHERS[name], tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"computes in other types.*state precision model"):
        xrt.plan(path, policy=policy("fp32"))
    want = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, X)[0]
    with xrt.InferenceSession(path, policy=policy("model")) as session:
        np.testing.assert_allclose(session.run(X)["y"], want, rtol=1e-6)
        # ONNX Runtime on the CPU computes many operators of fp16 in fp32, and the report says so.
        assert session.explain(X, runs=1).honoured == (name != "fp16")


@pytest.mark.parametrize("name", PLAIN)
def test_models_in_fp32_and_integers_are_enforced_and_honoured(name: str, tmp_path: Path) -> None:
    with xrt.InferenceSession(write(PLAIN[name], tmp_path), policy=policy("fp32")) as session:
        assert session.explain(X, runs=1).honoured


def test_a_plan_that_is_not_strict_names_the_nodes_and_the_report_agrees(tmp_path: Path) -> None:
    path = write(OTHERS["cast"], tmp_path)
    plan = xrt.plan(path, policy=policy("fp32", mode="prefer"))
    (control,) = (control for control in plan.controls if control.key == "execution.precision")
    assert control.enforceability == "unsupported"
    assert "(Softmax, fp64)" in control.reason
    with pytest.warns(xrt.XpuRuntimeWarning, match="other types"):
        session = xrt.InferenceSession(path, policy=policy("fp32", mode="prefer"))
    with session:
        (seen,) = (
            deviation for deviation in session.explain(X, runs=1).deviations if deviation.key == "execution.precision"
        )
    assert "fp64" in seen.observed


@pytest.mark.needs_module("openvino")
@pytest.mark.parametrize("name", ["cast", "constant", "weight", "inside"])
def test_openvino_computes_fp64_in_fp32_which_is_what_fp32_asks_for(name: str, tmp_path: Path) -> None:
    path = write(OTHERS[name], tmp_path)
    with xrt.InferenceSession(path, policy=policy("fp32", "openvino")) as session:
        assert session.explain(X, runs=1).honoured


#: Ways to come by fp64 of which nothing is computed in fp32, and others.
WIDE = {
    **{name: OTHERS[name] for name in ("cast", "constant", "weight", "inside")},
    "casts": "{ d = Cast<to = 11>(x) y = Cast<to = 1>(d) }",
    "branch": (
        "{ m = ReduceMax<keepdims = 0>(x) c = Cast<to = 9>(m) y = If(c) "
        "<then_branch = t () => (float[2, 4] p) { d = Cast<to = 11>(x) e = Exp(d) p = Cast<to = 1>(e) }, "
        "else_branch = e () => (float[2, 4] p) { p = Identity(x) }> }"
    ),
}


@pytest.mark.needs_module("openvino")
@pytest.mark.parametrize("name", WIDE)
def test_openvino_is_refused_for_fp64_under_strict(name: str, tmp_path: Path) -> None:
    path = write(WIDE[name], tmp_path)
    execution = {"engine": "openvino", "device": "cpu"}
    with pytest.raises(xrt.UnsupportedOperationError, match=r"computes fp64 in fp32.*state precision fp32") as refused:
        xrt.plan(path, policy={"mode": "strict", "execution": execution})
    (fix,) = re.findall(r"\((execution: {[^}]*})\)", str(refused.value))
    want = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, X)[0]
    with xrt.InferenceSession(path, policy={"mode": "strict", **yaml.safe_load(fix)}) as session:
        np.testing.assert_allclose(session.run(X)["y"], want, rtol=1e-6)
        assert session.explain(X, runs=1).honoured
    both = {"engine": ["openvino", "onnxruntime"], "device": "cpu"}
    assert xrt.plan(path, policy={"mode": "strict", "execution": both}).engine == "onnxruntime"
    with pytest.warns(xrt.XpuRuntimeWarning, match="computes fp64 in fp32"):
        session = xrt.InferenceSession(path, policy={"execution": execution})
    with session:
        assert not session.explain(X, runs=1).honoured


@pytest.mark.needs_module("openvino")
@pytest.mark.parametrize(("engine", "precision"), [("openvino", "model"), ("onnxruntime", "fp32")])
def test_fp64_inside_of_a_function_is_refused_under_strict(engine: str, precision: str, tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[2, 4] x) => (float[2, 4] y) { y = own.wide(x) } '
        '<domain: "own", opset_import: ["" : 17]> wide (a) => (b) '
        "{ d = Cast<to = 11>(a) e = Softmax(d) b = Cast<to = 1>(e) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(xrt.UnsupportedOperationError, match=r"\(Softmax, fp64\)"):
        xrt.plan(tmp_path / "model.onnx", policy=policy(precision, engine))


@pytest.mark.needs_module("openvino")
def test_a_constant_in_fp64_that_is_cast_is_no_fp64(tmp_path: Path) -> None:
    body = "{ c = Constant<value = double[1] {2.0}>() d = Cast<to = 1>(c) y = Mul(x, d) }"
    with xrt.InferenceSession(write(body, tmp_path), policy=policy("model", "openvino")) as session:
        assert session.explain(X, runs=1).honoured
