# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""8-bit products of processors without VNNI: what raw engines compute here, and what sessions do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime as xrt
from xpuruntime._core import DeviceManager
from xpuruntime.engines.known_errors import applies_to, known_errors
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.quantization.judge import saturates_on, saturating_nodes
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.runtime.snapshot import machine_snapshot

if TYPE_CHECKING:
    from pathlib import Path

FEATURES = DeviceManager.instance().get_all_devices()[0].features
HERE = saturates_on(FEATURES)
RNG = np.random.default_rng(0)
SHAPES = {"MatMul": ((5, 64), (64, 32)), "Gemm": ((5, 64), (64, 32)), "Conv": ((1, 16, 8, 8), (8, 16, 3, 3))}
#: With a range of 2 and these, a uint8 activation is up to 255 and an int8 one up to 127.
SCALE, WEIGHT_SCALE = np.float32(0.008), np.float32(0.01)


def pair(path: Path, op: str, activation: Any, largest: int) -> Any:
    """Write a product with quantized operands; return the path, inputs, and its result without integer kernels."""
    shape, weight_shape = SHAPES[op]
    x = RNG.uniform(-1, 1, shape).astype(np.float32)
    q = RNG.integers(-largest, largest + 1, weight_shape).astype(np.int8)
    zero = np.array(128 if activation == np.uint8 else 0, activation)
    nodes = [
        h.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], name="quantize"),
        h.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], name="back"),
        h.make_node("DequantizeLinear", ["w", "ws"], ["wd"], name="weight"),
        h.make_node(op, ["xd", "wd"], ["r"], name="product"),
        h.make_node("QuantizeLinear", ["r", "so", "z"], ["rq"], name="result"),
        h.make_node("DequantizeLinear", ["rq", "so", "z"], ["y"], name="last"),
    ]
    weights = {"s": SCALE, "z": zero, "w": q, "ws": WEIGHT_SCALE, "so": np.float32(0.12)}
    save(path, nodes, x.shape, weights)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # every node in floats
    plain = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return path, {"x": x}, plain.run(None, {"x": x})[0]


def dynamic(path: Path, largest: int) -> Any:
    x = RNG.uniform(-1, 1, (5, 64)).astype(np.float32)
    q = RNG.integers(-largest, largest + 1, (64, 32)).astype(np.int8)
    nodes = [
        h.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"], name="quantize"),
        h.make_node("MatMulInteger", ["xq", "w", "xz"], ["yi"], name="product"),
        h.make_node("Cast", ["yi"], ["yf"], name="cast", to=T.FLOAT),
        h.make_node("Mul", ["xs", "ws"], ["scale"], name="scales"),
        h.make_node("Mul", ["yf", "scale"], ["y"], name="scaled"),
    ]
    save(path, nodes, x.shape, {"w": q, "ws": WEIGHT_SCALE})
    return path, {"x": x}, x.astype(np.float64) @ (q * float(WEIGHT_SCALE))


def save(path: Path, nodes: list[Any], shape: Any, weights: dict[str, Any]) -> None:
    tensors = [nh.from_array(np.asarray(weight), name) for name, weight in weights.items()]
    info, value_info = h.make_tensor_value_info("x", T.FLOAT, shape), h.make_tensor_value_info("y", T.FLOAT, None)
    graph = h.make_graph(nodes, "g", [info], [value_info], tensors)
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)


def far(got: Any, want: Any) -> bool:
    return bool(np.abs(got - want).max() > 0.05 * np.abs(want).max())


CASES = [(op, kind) for op in SHAPES for kind in (np.uint8, np.int8)] + [("dynamic", np.uint8)]


def case(path: Path, op: str, activation: Any, largest: int) -> Any:
    return dynamic(path, largest) if op == "dynamic" else pair(path, op, activation, largest)


@pytest.mark.parametrize("largest", [127, 64])
@pytest.mark.parametrize(("op", "activation"), CASES)
def test_onnxruntime_sums_exactly(op: str, activation: Any, largest: int, tmp_path: Path) -> None:
    path, feeds, want = case(tmp_path / "model.onnx", op, activation, largest)
    raw = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    integer = op != "Gemm"  # without a bias it is left in floats
    assert far(raw, want) == (HERE and largest > 64 and integer), "the processor and the table do not agree"
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    with xrt.InferenceSession(path, policy=policy) as session:
        assert not far(session.run(feeds)["y"], want)
        exact = session.plan.settings["session"].get("session.x64quantprecision")
    assert exact == ("1" if HERE and largest > 64 else None)
    assert saturating_nodes(inspect_model(path)) == (["product"] if largest > 64 else [])


@pytest.mark.parametrize("largest", [127, 64])
@pytest.mark.parametrize("op", SHAPES)
def test_openvino_is_refused_and_named(op: str, largest: int, tmp_path: Path) -> None:
    ov = pytest.importorskip("openvino")
    path, feeds, want = case(tmp_path / "model.onnx", op, np.uint8, largest)
    core = ov.Core()
    raw = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds)[0]
    (row,) = [error for error in known_errors("openvino") if error.saturates]
    wrong = HERE and largest > 64
    assert far(raw, want) == (wrong and applies_to(row, ov.__version__, "cpu"))
    policy = {"mode": "strict", "execution": {"engine": "openvino", "device": "cpu"}}
    if wrong:
        with pytest.raises(UnsupportedOperationError, match="'product' cuts sums of 8-bit products off"):
            xrt.plan(path, policy=policy)
    else:
        assert xrt.plan(path, policy=policy).engine == "openvino"


def test_a_processor_with_vnni_needs_nothing(tmp_path: Path) -> None:
    path, _, _ = case(tmp_path / "model.onnx", "MatMul", np.uint8, 127)
    here = machine_snapshot()
    engines = {name: default_registry().get(name).probe() for name in ("onnxruntime",)}
    cases = ((("avx2", "avx512_vnni"), None), (("avx2", "avx_vnni"), None), (("avx2",), "1"), ((), None))
    for features, exact in cases:
        cpu = msgspec.structs.replace(here.cpu, features=features)
        machine = msgspec.structs.replace(here, cpu=cpu, engines=engines)
        plan = xrt.plan(path, engine="onnxruntime", device="cpu", machine=machine)
        assert plan.settings["session"].get("session.x64quantprecision") == exact, features


def test_what_the_policy_states_stays(tmp_path: Path) -> None:
    path, _, _ = case(tmp_path / "model.onnx", "MatMul", np.uint8, 127)
    options = {"onnxruntime": {"session.x64quantprecision": 0}}
    execution = {"engine": "onnxruntime", "device": "cpu", "provider_options": options}
    assert xrt.plan(path, policy={"execution": execution}).settings["session"]["session.x64quantprecision"] == "0"
