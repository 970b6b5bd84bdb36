# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The precision that OpenVINO multiplies quantized models in, decided by OpenVINO's own numbers."""

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
        weight if isinstance(weight, onnx.TensorProto) else nh.from_array(np.asarray(weight), n)
        for n, weight in weights.items()
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
        h.make_node("DequantizeLinear", ["w", "s"], ["f"], name="dequantize", axis=0, block_size=32),
        h.make_node("MatMul", ["x", "f"], ["y"], name="product"),
    ]
    weight = h.make_tensor("w", kind, [K, N], q.ravel().tolist())
    return saved(folder, nodes, {"w": weight, "s": scale}), q * 0.1


def pair(folder: Path) -> Path:
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
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


def test_a_quantized_pair_is_int8(tmp_path: Path) -> None:
    path = pair(tmp_path)
    assert explained(path, "model")[1].honoured
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory"):
        assert explained(path, "int8")[1].honoured
    _, report = explained(path, "fp32")
    assert [(deviation.key, deviation.status) for deviation in report.deviations] == [
        ("execution.precision", "substituted")
    ]
    assert "int8" in report.deviations[0].observed


IMAGE = [1, 8, 10, 10]
#: Operator, its attributes, shape of its input and of its weight, type of the weight, and whether its result is
#: quantized, too. Without a weight, it is one of one input.
QUANTIZED: dict[str, tuple[str, dict[str, Any], list[int], list[int], Any, bool]] = {
    "conv": ("Conv", {}, IMAGE, [16, 8, 3, 3], np.int8, True),
    "conv of uint8 weights": ("Conv", {}, IMAGE, [16, 8, 3, 3], np.uint8, False),
    "conv with groups": ("Conv", {"group": 2}, IMAGE, [16, 4, 3, 3], np.int8, True),
    "transposed conv": ("ConvTranspose", {}, IMAGE, [8, 16, 3, 3], np.int8, True),
    "product": ("MatMul", {}, [5, K], [K, N], np.int8, False),
    "product of uint8 weights": ("MatMul", {}, [5, K], [K, N], np.uint8, False),
    "gemm": ("Gemm", {"alpha": 0.5, "transB": 1}, [5, K], [N, K], np.int8, True),
    "pool": ("AveragePool", {"kernel_shape": [2, 2]}, IMAGE, [], None, True),
    "softmax": ("Softmax", {}, [5, 8], [], None, True),
}


def quantized(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    op, attributes, shape, weight, kind, again = QUANTIZED[name]
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="back"),
        h.make_node(op, ["d", "f"] if weight else ["d"], ["r" if again else "y"], name="product", **attributes),
    ]
    tensors = {"s": np.float32(0.02), "z": np.uint8(128)}
    if weight:
        nodes.insert(2, h.make_node("DequantizeLinear", ["w", "ws", "wz"], ["f"], name="weight"))
        zero = 128 * (kind is np.uint8)
        integers = (RNG.integers(-60, 60, weight) + zero).astype(kind)
        tensors |= {"w": integers, "ws": np.float32(0.01), "wz": kind(zero)}
    if again:
        nodes.append(h.make_node("QuantizeLinear", ["r", "s", "z"], ["qr"], name="quantize_result"))
        nodes.append(h.make_node("DequantizeLinear", ["qr", "s", "z"], ["y"], name="result"))
    border = [h.make_tensor_value_info("x", T.FLOAT, shape)], [h.make_tensor_value_info("y", T.FLOAT, None)]
    graph = h.make_graph(
        nodes, "g", *border, [nh.from_array(np.asarray(tensor), key) for key, tensor in tensors.items()]
    )
    path = folder / "model.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10), path)
    return path, {"x": RNG.uniform(-1, 1, shape).astype(np.float32)}


def raw_kernels(path: Path, feeds: dict[str, Any]) -> dict[str, str]:
    """Return the kernels that OpenVINO itself names, by layer; those that only change a type are left out."""
    import openvino as ov

    compiled = ov.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": "YES"})
    compiled(feeds)
    found = {}
    for operation in compiled.get_runtime_model().get_ordered_ops():
        facts = {key: value.astype(str) for key, value in operation.get_rt_info().items() if hasattr(value, "astype")}
        found[facts.get("layerType", "?")] = facts.get("primitiveType", "?")
    changes = ("Subgraph", "Eltwise", "FakeQuantize", "Convert", "Reorder", "Transpose", "Input", "Output", "Const")
    return {layer: kernel for layer, kernel in found.items() if layer not in changes}


@pytest.mark.parametrize("name", QUANTIZED)
def test_strict_fp32_is_honoured_where_kernels_multiply_floats(name: str, tmp_path: Path) -> None:
    path, feeds = quantized(tmp_path, name)
    (kernel,) = raw_kernels(path, feeds).values()
    policy = {"mode": "strict", "execution": {"engine": "openvino", "device": "cpu", "precision": "fp32"}}
    with xrt.InferenceSession(path, policy=policy) as session:
        report = session.explain(feeds, runs=1)
    (seen,) = [observation for observation in report.observations if observation.key == "execution.precision"]
    floats = kernel.endswith("_f32")
    assert floats or kernel.endswith("_I8")
    assert seen.status == ("honoured" if floats else "substituted"), kernel
    (unit,) = [unit for unit in report.units if "product" in unit.source_nodes and unit.relation != "folded"]
    assert (unit.precision_requested, unit.precision_run) == ("fp32", "fp32" if floats else "int8")
    assert unit.status == seen.status
    (control,) = [control for control in session.plan.controls if control.key == "execution.precision"]
    assert "in integers" in control.reason


@pytest.mark.filterwarnings("ignore:.*int8 is advisory")
def test_what_runs_inside_of_a_branch_is_not_known(tmp_path: Path) -> None:
    """OpenVINO names the type of the condition there, which is no evidence of int8 nor of fp32."""

    def branch(name: str, op: str) -> Any:
        nodes = [
            h.make_node("MatMul", ["d", "f"], [f"{name}_m"], name=f"{name}_product"),
            h.make_node(op, [f"{name}_m"], [f"{name}_y"], name=f"{name}_after"),
        ]
        return h.make_graph(nodes, name, [], [h.make_tensor_value_info(f"{name}_y", T.FLOAT, [5, N])])

    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="back"),
        h.make_node("DequantizeLinear", ["w", "ws"], ["f"], name="weight"),
        h.make_node("ReduceMax", ["x"], ["largest"], name="largest", keepdims=0),
        h.make_node("Greater", ["largest", "zero"], ["c"], name="greater"),
        h.make_node(
            "If", ["c"], ["y"], name="if", then_branch=branch("a", "Neg"), else_branch=branch("b", "Relu")
        ),
    ]  # fmt: skip
    weights = {"w": RNG.integers(-60, 60, (K, N)).astype(np.int8), "ws": np.float32(0.01), "zero": np.float32(0)}
    path = saved(tmp_path, nodes, {**weights, "s": np.float32(0.01), "z": np.uint8(128)})
    for precision in ("fp32", "int8"):
        execution = {"engine": "openvino", "device": "cpu", "precision": precision}
        with xrt.InferenceSession(path, policy={"execution": execution}) as session:
            report = session.explain({"x": X}, runs=1)
        (seen,) = [observation for observation in report.observations if observation.key == "execution.precision"]
        assert seen.status == "unobservable", seen
        assert "in which precision" in seen.reason
