# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NaN and inputs without elements, which OpenVINO computes otherwise than ONNX: sessions refuse them in each call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from openvino_sessions import open_

import xpuruntime as xrt
from xpuruntime.engines.known_errors import known_errors

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[4] / "tools"))

from onnx_backend_suite import directly

pytest.importorskip("openvino")
NAN = np.float32([[np.nan, 1]])
NONE = np.ones((0, 2), np.float32)
#: A graph of float[n, 2] x, an input that OpenVINO computes wrongly, and the node that a message names.
WRONG: list[tuple[str, Any, str]] = [
    ("(float[n, 2] y) { y = Relu (x) }", NAN, "Relu"),
    ("(float[n, 2] y) { y = Exp (x) }", NAN, "Exp"),
    ("(float[n, 2] y) { y = Softmax (x) }", NAN, "Softmax"),
    ("(bool[n, 2] y) <float zero = {0.0}> { y = Greater (x, zero) }", NAN, "Greater"),
    ("(float[n, 2] y) { twice = Add (x, x) y = Relu (twice) }", NAN, "Relu"),
    ("(float[n, 2] y) { y = Relu (x) }", np.full((9000, 2), np.nan, np.float32), "Relu"),
    ("(float[2] y) <int64[1] axes = {0}> { y = ReduceMax <keepdims = 0> (x, axes) }", NONE, "ReduceMax"),
    ("(float[2] y) <int64[1] axes = {0}> { y = ReduceMin <keepdims = 0> (x, axes) }", NONE, "ReduceMin"),
]
#: Graphs that compute the same input as ONNX does.
RIGHT: list[tuple[str, Any]] = [
    ("(float[n, 2] y) { y = Add (x, x) }", NAN),
    ("(float[n, 2] y) { y = Relu (x) }", np.float32([[-np.inf, np.inf]])),
    ("(float[n, 2] y) <float zero = {0.0}> { no = IsNaN (x) z = Where (no, zero, x) y = Relu (z) }", NAN),
    ("(float[n, 2] y) <float zero = {0.0}> { no = IsNaN (x) is = Not (no) z = Where (is, x, zero) y = Relu (z) }", NAN),
    ("(float[n, 2] y) { y = Relu (x) }", NONE),
    ("(float[k] y) <float[1, 2] w = {3, 4}, int64[1] axes = {1}> "
     "{ z = Concat <axis = 0> (x, w) y = ReduceMax <keepdims = 0> (z, axes) }", NONE),
]  # fmt: skip


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g (float[n, 2] x) => {text}')


def saved(text: str, folder: Path) -> Path:
    onnx.save(model(text), folder / "model.onnx")
    return folder / "model.onnx"


def calls(session: xrt.InferenceSession, x: Any) -> list[Callable[[], Any]]:
    def bound() -> Any:
        binding = session.bind({"x": np.ones((1, 2), np.float32)})
        binding.run()
        if x.shape == (1, 2):
            binding.inputs["x"][...] = x
        else:
            binding.inputs["x"] = x
        return binding.run()

    return [
        lambda: session.run({"x": x}),
        lambda: session.run_async({"x": x}).result(60),
        lambda: session.explain({"x": x}, runs=1),
        bound,
    ]


@pytest.mark.parametrize(("text", "x", "node"), WRONG)
def test_values_that_openvino_computes_wrongly_are_refused(text: str, x: Any, node: str, tmp_path: Path) -> None:
    (want,), (got,) = (directly(engine, model(text))([x]) for engine in ("onnxruntime", "openvino"))
    assert not np.array_equal(want, got, equal_nan=want.dtype != bool), "OpenVINO computes it right: close the row"
    with open_(saved(text, tmp_path)) as session:
        for _ in range(2):
            session.run({"x": np.ones((1, 2), np.float32)})
            for call in calls(session, x):
                with pytest.raises(xrt.InputError, match=rf"input 'x' .* {node} '.* Fix: .*onnxruntime"):
                    call()


@pytest.mark.parametrize(("text", "x"), RIGHT)
def test_values_that_come_out_right_are_not_refused(text: str, x: Any, tmp_path: Path) -> None:
    (want,) = directly("onnxruntime", model(text))([x])
    with open_(saved(text, tmp_path)) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], want)


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_nan_of_other_types_is_refused(kind: str, tmp_path: Path) -> None:
    proto = model("(float[n, 2] y) { y = Relu (x) }")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    onnx.save(proto, tmp_path / "model.onnx")
    with open_(tmp_path / "model.onnx", precision="fp32") as session, pytest.raises(xrt.InputError, match="holds NaN"):
        session.run({"x": NAN.astype(kind)})


def test_an_attention_without_keys_is_refused_and_one_without_a_past_is_not(tmp_path: Path) -> None:
    query, none = np.ones((1, 2, 3, 8), np.float32), np.ones((1, 2, 0, 8), np.float32)
    sizes = "float[1, 2, m, 8] k, float[1, 2, m, 8] v"
    head = '<ir_version: 10, opset_import: ["" : 23]> g (float[1, 2, n, 8] q, '
    apart = f"{head}{sizes}) => (float[1, 2, n, 8] y) {{ y = Attention (q, k, v) }}"
    sizes += ", float[1, 2, p, 8] pk, float[1, 2, p, 8] pv"
    past = f"{head}{sizes}) => (float[1, 2, n, 8] y) {{ y, nk, nv = Attention (q, k, v, , pk, pv) }}"
    for name, text in (("apart", apart), ("past", past)):
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"{name}.onnx")
    with (
        open_(tmp_path / "apart.onnx") as session,
        pytest.raises(xrt.InputError, match=r"'[kv]' has no elements .*Attention"),
    ):
        session.run({"q": query, "k": none, "v": none})
    with open_(tmp_path / "past.onnx") as session:
        session.run({"q": query, "k": query, "v": query, "pk": none, "pv": none})


def test_a_subgraph_and_a_function_are_searched(tmp_path: Path) -> None:
    inside = model(
        "(float[n, 2] y) <bool c = {1}> { y = If (c) <then_branch = t () => (float[n, 2] a) { a = Relu (x) }, "
        "else_branch = e () => (float[n, 2] b) { b = Identity (x) }> }"
    )
    onnx.save(inside, tmp_path / "model.onnx")
    with open_(tmp_path / "model.onnx") as session, pytest.raises(xrt.InputError, match="holds NaN"):
        session.run({"x": NAN})


def test_both_rows_are_in_the_table() -> None:
    assert {row.values for row in known_errors("openvino")} == {"", "nan", "empty"}
