# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The precision that OpenVINO multiplies quantised models in, decided by OpenVINO's own numbers."""

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

pytest.importorskip("openvino")

RNG = np.random.default_rng(0)
K, N = 64, 32
X = RNG.uniform(-1, 1, (5, K)).astype(np.float32)


def saved(folder: Path, nodes: list[Any], weights: dict[str, Any]) -> Path:
    tensors = [
        one if isinstance(one, onnx.TensorProto) else nh.from_array(np.asarray(one), n) for n, one in weights.items()
    ]
    x, y = (h.make_tensor_value_info(name, T.FLOAT, [5, size]) for name, size in (("x", K), ("y", N)))
    graph = h.make_graph(nodes, "g", [x], [y], tensors)
    path = folder / "model.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10), path)
    return path


def weight_only(folder: Path, kind: int) -> tuple[Path, Any]:
    q = RNG.integers(-8, 8, (K, N))
    scale = np.full((K // 32, N), 0.1, np.float32)
    nodes = [
        h.make_node("DequantizeLinear", ["w", "s"], ["f"], name="dequantise", axis=0, block_size=32),
        h.make_node("MatMul", ["x", "f"], ["y"], name="product"),
    ]
    weight = h.make_tensor("w", kind, [K, N], q.ravel().tolist())
    return saved(folder, nodes, {"w": weight, "s": scale}), q * 0.1


def pair(folder: Path) -> Path:
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantise"),
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="back"),
        h.make_node("DequantizeLinear", ["w", "ws"], ["f"], name="weight"),
        h.make_node("MatMul", ["d", "f"], ["y"], name="product"),
    ]
    # Weights of 7 bits: without VNNI, the sums of larger ones saturate.
    weights = {"w": RNG.integers(-60, 60, (K, N)).astype(np.int8), "ws": np.float32(0.01)}
    return saved(folder, nodes, {**weights, "s": np.float32(0.01), "z": np.uint8(128)})


def explained(path: Path, precision: str) -> tuple[Any, Any]:
    execution = {"engine": "openvino", "device": "cpu", "precision": precision}
    with xrt.InferenceSession(path, policy={"execution": execution}) as session:
        return session.run({"x": X})["y"], session.explain({"x": X}, runs=1)


@pytest.mark.parametrize("kind", [T.INT4, T.INT8])
def test_weights_alone_are_no_int8(kind: int, tmp_path: Path) -> None:
    """The activations stay in floats: fp32 is honoured, and int8 is not."""
    path, weight = weight_only(tmp_path, kind)
    for precision in ("fp32", "model"):
        got, report = explained(path, precision)
        true = X.astype(np.float64) @ weight
        assert np.abs(got - true).max() / np.abs(true).max() < 1e-5
        assert report.honoured, report.observations
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory"):
        _, report = explained(path, "int8")
    (deviation,) = report.deviations
    assert (deviation.key, deviation.status) == ("execution.precision", "substituted")
    assert "fp32" in deviation.observed


def test_a_quantised_pair_is_int8(tmp_path: Path) -> None:
    path = pair(tmp_path)
    assert explained(path, "model")[1].honoured
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory"):
        assert explained(path, "int8")[1].honoured
    _, report = explained(path, "fp32")
    assert [(one.key, one.status) for one in report.deviations] == [("execution.precision", "substituted")]
    assert "int8" in report.deviations[0].observed
