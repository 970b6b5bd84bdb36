# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer and RMS norms, as nodes and as arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rewriting_models import accounted, close, found, graph, normal, only, refused, session, stock

if TYPE_CHECKING:
    from pathlib import Path

G, B = normal(6), normal(6, seed=1)
EPS, TWO, ONE, HALF = np.float32(1e-3), np.float32(2), np.float32(1), np.float32(-0.5)
SCALARS = {"eps": EPS, "two": TWO, "one": ONE, "neghalf": HALF}
IN, OUT = "float[a, b, 6] x", "float[a, b, 6] y"
AXES = {"axes": np.array([-1], np.int64)}


def layer_norm(x: Any, g: Any, b: Any, eps: float) -> Any:
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * g + b


def rms_norm(x: Any, g: Any, eps: float) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * g


LAYER_NORMS = {
    "node": "y = LayerNormalization<epsilon=0.001>(x, g, b)",
    "node, axis counted from the front": "y = LayerNormalization<axis=2, epsilon=0.001>(x, g, b)",
    "Pow and Div": (
        "m = ReduceMean(x, axes)\nd = Sub(x, m)\np = Pow(d, two)\nv = ReduceMean(p, axes)\ne = Add(v, eps)\n"
        "s = Sqrt(e)\nq = Div(d, s)\nr = Mul(q, g)\ny = Add(r, b)"
    ),
    "Mul and two Subs": (
        "m = ReduceMean(x, axes)\nd = Sub(x, m)\nd2 = Sub(x, m)\np = Mul(d2, d2)\nv = ReduceMean(p, axes)\n"
        "e = Add(eps, v)\ns = Sqrt(e)\nq = Div(d, s)\nr = Mul(g, q)\ny = Add(b, r)"
    ),
    "reciprocal": (
        "m = ReduceMean(x, axes)\nd = Sub(x, m)\np = Pow(d, two)\nv = ReduceMean(p, axes)\ne = Add(v, eps)\n"
        "s = Sqrt(e)\ni = Reciprocal(s)\nq = Mul(d, i)\nr = Mul(q, g)\ny = Add(r, b)"
    ),
}
MEAN = "v = ReduceMean(p, axes)\ne = Add(v, eps)"
RMS_NORMS = {
    "Pow and Div": f"p = Pow(x, two)\n{MEAN}\ns = Sqrt(e)\nq = Div(x, s)\ny = Mul(q, g)",
    "one over the root": f"p = Mul(x, x)\n{MEAN}\ns = Sqrt(e)\ni = Div(one, s)\nq = Mul(x, i)\ny = Mul(g, q)",
    "power": f"p = Pow(x, two)\n{MEAN}\ni = Pow(e, neghalf)\nq = Mul(i, x)\ny = Mul(q, g)",
}


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norms(name: str, tmp_path: Path) -> None:
    model = graph(IN, OUT, LAYER_NORMS[name], {"g": G, "b": B, **SCALARS, **AXES})
    rewrite = only(model)
    assert (rewrite.op, rewrite.kind) == ("LayerNormalization", "layer_norm")
    assert rewrite.attributes["epsilon"] == pytest.approx(1e-3)
    assert len(rewrite.nodes) == len(model.graph.node)
    x = normal(2, 3, 6) * 3 + 1
    with session(model, tmp_path) as opened:
        close(opened.run({"x": x})["y"], layer_norm(x, G, B, 1e-3))
        report = opened.explain({"x": x}, runs=1)
    accounted(opened, report)
    assert [unit.kernel for unit in report.units if unit.kernel] == ["cpu.vectorised"]


@pytest.mark.parametrize("name", RMS_NORMS)
def test_rms_norms(name: str, tmp_path: Path) -> None:
    model = graph(IN, OUT, RMS_NORMS[name], {"g": G, **SCALARS, **AXES})
    rewrite = only(model)
    assert (rewrite.op, rewrite.kind) == ("RMSNormalization", "rms_norm")
    x = normal(2, 3, 6)
    with session(model, tmp_path) as opened:
        close(opened.run({"x": x})["y"], rms_norm(x, G, 1e-3))
        accounted(opened, opened.explain({"x": x}, runs=1))


@pytest.mark.parametrize("domain", ["RMSNormalization", "SimplifiedLayerNormalization"])
def test_rms_norm_nodes(domain: str, tmp_path: Path) -> None:
    opset = 23 if domain == "RMSNormalization" else 21
    model = graph(IN, OUT, "y = RMSNormalization<epsilon=0.001>(x, g)", {"g": G}, opset=23)
    model.graph.node[0].op_type = domain
    del model.opset_import[:]
    from onnx import helper

    model.opset_import.append(helper.make_opsetid("", opset))
    x = normal(2, 3, 6)
    assert only(model).op == "RMSNormalization"
    close(rms_norm(x, G, 1e-3), stock(model, {"x": x})["y"].astype(np.float64))


def test_several_axes(tmp_path: Path) -> None:
    g, b = normal(3, 6), normal(3, 6, seed=1)
    model = graph("float[n, 3, 6] x", "float[n, 3, 6] y", "y = LayerNormalization<axis=1>(x, g, b)", {"g": g, "b": b})
    assert only(model).attributes["axis"] == -2
    x = normal(4, 3, 6)
    with session(model, tmp_path) as opened:
        close(opened.run({"x": x})["y"], stock(model, {"x": x})["y"])


@pytest.mark.parametrize(
    ("outputs", "body", "weights", "reason"),
    [
        (OUT, "y = LayerNormalization(x, g)", {"g": normal(1, 6)}, "one number for each element"),
        (OUT, "y = LayerNormalization(x, g)", {"g": normal(1)}, "one number for each element"),
        (OUT + ", float[a, b, 1] m", "y, m = LayerNormalization(x, g)", {"g": G}, "mean or deviation is read"),
        (OUT, "y = LayerNormalization<stash_type=11>(x, g)", {"g": G}, "stash_type 11"),
    ],
)
def test_why_a_norm_stays(outputs: str, body: str, weights: dict[str, Any], reason: str) -> None:
    assert reason in refused(graph(IN, outputs, body, weights))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("v = ReduceMean(p, axes)", "v = ReduceMean<keepdims=0>(p, axes)"),
        ("v = ReduceMean(p, axes)", "v = ReduceMean(p, other)"),
        ("p = Pow(d, two)", "p = Pow(d, one)"),
        ("q = Div(d, s)", "q = Div(x, s)"),
        ("q = Div(d, s)", "q = Div(s, d)"),
        ("m = ReduceMean(x, axes)", "m = ReduceMax(x, axes)"),
        ("r = Mul(q, g)", "r = Add(q, g)"),
    ],
)
def test_arithmetic_that_is_no_norm(before: str, after: str) -> None:
    text = LAYER_NORMS["Pow and Div"]
    assert before in text
    weights = {"g": G, "b": B, **SCALARS, **AXES, "other": np.array([1], np.int64)}
    model = graph("float[6, 6, 6] x", "float[6, 6, 6] y", text.replace(before, after), weights)
    result = found(model, {"layer_norm": "cpu.vectorised", "rms_norm": "cpu.vectorised"})
    assert not [rewrite for rewrite in result.rewrites if len(rewrite.nodes) > 7]


def test_arithmetic_that_others_read_is_left() -> None:
    text = LAYER_NORMS["Pow and Div"]
    model = graph(IN, OUT + ", float[a, b, 1] v", text, {"g": G, "b": B, **SCALARS, **AXES})
    assert not found(model).rewrites
