# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The precision that ONNX Runtime's quantized operators multiply in, decided by the engine's own numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime as xrt
from xpuruntime.engines.onnxruntime.precision_controls import OPERATORS
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(0)
K, N = 64, 32
#: Relative error: above it activations were rounded to 8 bits, below it they were not.
ROUNDED = 1e-4


def value(name: str, shape: Any, kind: int = T.FLOAT) -> Any:
    return h.make_tensor_value_info(name, kind, shape)


def save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any]) -> Path:
    tensors = [
        weight if isinstance(weight, onnx.TensorProto) else nh.from_array(weight, name)
        for name, weight in weights.items()
    ]
    graph = h.make_graph(nodes, "g", inputs, outputs, tensors)
    opsets = [h.make_opsetid("", 21), h.make_opsetid("com.microsoft", 1)]
    onnx.save(h.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def scales(blocks: int) -> Any:
    return (np.abs(RNG.standard_normal((blocks, N))) * 0.1 + 0.01).astype(np.float32)


def weight_only(path: Path, kind: int, op: str) -> tuple[Path, Any]:
    """DequantizeLinear of a weight in blocks, and a product: return the weight in float64."""
    low, high = {T.INT4: (-8, 8), T.UINT4: (0, 16), T.INT8: (-128, 128), T.UINT8: (0, 256)}[kind]
    q, scale = RNG.integers(low, high, (K, N)), scales(K // 32)
    nodes = [
        h.make_node("DequantizeLinear", ["w", "s"], ["wf"], name="dq", axis=0, block_size=32),
        h.make_node(op, ["x", "wf"], ["y"], name="product"),
    ]
    weights = {"w": h.make_tensor("w", kind, [K, N], q.ravel().tolist()), "s": scale}
    model = save(path, nodes, [value("x", ["n", K])], [value("y", ["n", N])], weights)
    return model, q * np.repeat(scale.astype(np.float64), 32, 0)


def n_bits(path: Path, bits: int, level: int | None) -> tuple[Path, Any]:
    q, scale = RNG.integers(0, 2**bits, (N, K)).astype(np.uint8), scales(K // 32).T.copy()
    packed = (q[:, 0::2] | (q[:, 1::2] << 4)).reshape(N, -1, 16) if bits == 4 else q.reshape(N, -1, 32)
    given = {} if level is None else {"accuracy_level": level}
    node = h.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], "product", domain="com.microsoft",
        K=K, N=N, bits=bits, block_size=32, **given,
    )  # fmt: skip
    model = save(path, [node], [value("x", ["n", K])], [value("y", ["n", N])], {"w": packed, "s": scale})
    exact = (q.astype(np.float64) - 2 ** (bits - 1)) * np.repeat(scale.astype(np.float64), 32, 1)
    return model, exact.T


def dynamic(path: Path, *, fused: bool) -> tuple[Path, Any]:
    """Activations quantized while running, as `quantize_dynamic` writes it, or as ONNX Runtime fuses it."""
    # Weights of 7 bits: without VNNI, the sums of larger ones saturate.
    q, scale = RNG.integers(-64, 65, (K, N)).astype(np.int8), np.float32(0.013)
    weights: dict[str, Any] = {"w": q, "ws": scale, "wz": np.int8(0)}
    if fused:
        nodes = [h.make_node("DynamicQuantizeMatMul", ["x", "w", "ws", "wz"], ["y"], "product", domain="com.microsoft")]
    else:
        nodes = [
            h.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"], name="quantize"),
            h.make_node("MatMulInteger", ["xq", "w", "xz", "wz"], ["yi"], name="product"),
            h.make_node("Cast", ["yi"], ["yf"], name="cast", to=T.FLOAT),
            h.make_node("Mul", ["xs", "ws"], ["scale"], name="scales"),
            h.make_node("Mul", ["yf", "scale"], ["y"], name="scaled"),
        ]
    model = save(path, nodes, [value("x", ["n", K])], [value("y", ["n", N])], weights)
    return model, q.astype(np.float64) * float(scale)


def error(got: Any, x: Any, weight: Any) -> float:
    true = x.astype(np.float64) @ weight
    return float(np.abs(got - true).max() / np.abs(true).max())


def product_of(report: Any) -> Any:
    (unit,) = [u for u in report.units if "product" in u.source_nodes and u.relation != "folded"]
    return unit


def open_(model: Path, precision: str = "model", mode: str = "prefer", **options: Any) -> xrt.InferenceSession:
    execution = {"engine": "onnxruntime", "device": "cpu", "precision": precision}
    if options:
        execution["provider_options"] = {"onnxruntime": options}  # type: ignore[assignment]
    return xrt.InferenceSession(model, policy={"mode": mode, "execution": execution})


X = RNG.standard_normal((5, K)).astype(np.float32)


@pytest.mark.skipif(ort.__version__.startswith("1.23."), reason="ONNX Runtime 1.23 fuses a MatMul of 4 bits only")
@pytest.mark.parametrize(("op", "kind"), [("MatMul", T.INT4), ("Gemm", T.UINT4), ("Gemm", T.INT8), ("MatMul", T.UINT8)])
def test_weight_only_models_are_fp32_when_it_is_said(tmp_path: Path, kind: int, op: str) -> None:
    """Raw ONNX Runtime rounds the activations to int8; under the policy it does not, and the report is true."""
    model, weight = weight_only(tmp_path / "m.onnx", kind, op)
    raw = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]
    assert error(raw, X, weight) > ROUNDED
    for precision, mode in (("fp32", "strict"), ("model", "prefer")):
        with open_(model, precision, mode) as session:
            report = session.explain({"x": X}, runs=1)
            assert error(session.run({"x": X})["y"], X, weight) < ROUNDED
        assert report.honoured, report.observations
        assert (product_of(report).op, product_of(report).precision_run) == ("MatMulNBits", "fp32")


def test_an_accuracy_level_of_the_user_is_reported_as_int8(tmp_path: Path) -> None:
    model, weight = weight_only(tmp_path / "m.onnx", T.INT4, "MatMul")
    with open_(model, "fp32", **{"session.qdq_matmulnbits_accuracy_level": 4}) as session:
        report = session.explain({"x": X}, runs=1)
        assert error(session.run({"x": X})["y"], X, weight) > ROUNDED
    assert [deviation.key for deviation in report.deviations] == ["execution.precision"]
    unit = product_of(report)
    assert (unit.precision_requested, unit.precision_run, unit.status) == ("fp32", "int8", "substituted")
    assert "'dq'" in report.deviations[0].reason or "'product'" in report.deviations[0].reason


@pytest.mark.parametrize(("bits", "level"), [(4, None), (4, 0), (4, 2), (4, 3), (4, 4), (8, 1), (8, 4)])
def test_levels_of_matmul_n_bits(tmp_path: Path, bits: int, level: int | None) -> None:
    model, weight = n_bits(tmp_path / "m.onnx", bits, level)
    with open_(model) as session:
        rounded = error(session.run({"x": X})["y"], X, weight) > ROUNDED
        report = session.explain({"x": X}, runs=1)
    assert report.honoured
    assert product_of(report).precision_run == ("int8" if rounded else "fp32")
    if not rounded:
        with open_(model, "fp32", "strict") as session:
            assert session.explain({"x": X}, runs=1).honoured
    else:
        with pytest.raises(UnsupportedOperationError, match=r"'product' \(MatMulNBits, accuracy_level 4\)"):
            open_(model, "fp32", "strict")


@pytest.mark.parametrize(("bits", "level", "compute"), [(4, 4, "int8"), (4, 0, "float"), (8, None, "float")])
def test_storage_and_computing_type_of_weights_are_two_claims(
    tmp_path: Path, bits: int, level: int | None, compute: str
) -> None:
    model, _ = n_bits(tmp_path / "m.onnx", bits, level)

    def claim(**weights: Any) -> xrt.InferenceSession:
        execution = {"engine": "onnxruntime", "device": "cpu", "weights": weights}
        return xrt.InferenceSession(model, policy={"mode": "strict", "execution": execution})

    stored = {"storage": f"int{bits}", "group": 32}
    other = {"float": "int8", "int8": "float"}[compute]
    if bits == 8 or compute == "float":
        with claim(**stored, compute=compute) as session:
            report = session.explain({"x": X}, runs=1)
        seen = {
            observation.key: observation.status for observation in report.observations if "weights" in observation.key
        }
        assert seen == dict.fromkeys(
            [f"execution.weights.{key}" for key in ("storage", "compute", "group")], "honoured"
        )
    if bits == 8 or other == "float":
        with pytest.raises(UnsupportedOperationError, match=rf"1 of 1 products differ: 'product' \({compute}\)"):
            claim(**stored, compute=other)
    for wrong in ({**stored, "storage": f"int{12 - bits}"}, {**stored, "group": 16}):
        with pytest.raises(UnsupportedOperationError, match="1 of 1 products differ"):
            claim(**wrong)
    with pytest.raises(UnsupportedOperationError, match="has no such product"):
        claim(**stored, exclude=["product"])


def test_a_product_of_floats_is_no_storage_of_integers(tmp_path: Path) -> None:
    weight = {"w": RNG.standard_normal((K, N)).astype(np.float32)}
    node = h.make_node("MatMul", ["x", "w"], ["y"], name="product")
    model = save(tmp_path / "m.onnx", [node], [value("x", ["n", K])], [value("y", ["n", N])], weight)
    policy = {"mode": "prefer", "execution": {"engine": "onnxruntime", "device": "cpu", "weights": {"storage": "int8"}}}
    with (
        pytest.warns(xrt.XpuRuntimeWarning, match=r"'product' \(float32\)"),
        xrt.InferenceSession(model, policy=policy) as session,
    ):
        (deviation,) = session.explain({"x": X}, runs=1).deviations
    assert (deviation.key, deviation.status) == ("execution.weights.storage", "unsupported")


@pytest.mark.parametrize("fused", [False, True])
def test_dynamically_quantized_models_are_int8(tmp_path: Path, fused: bool) -> None:
    model, weight = dynamic(tmp_path / "m.onnx", fused=fused)
    low, high = min(0.0, float(X.min())), max(0.0, float(X.max()))
    scale = (high - low) / 255
    zero = np.round(-low / scale)
    rounded = (np.clip(np.round(X / scale) + zero, 0, 255) - zero) * scale
    for precision in ("int8", "model"):
        with open_(model, precision) as session:
            got, report = session.run({"x": X})["y"], session.explain({"x": X}, runs=1)
        assert error(got, X, weight) > ROUNDED > error(got, rounded, weight)
        assert report.honoured, report.observations
        assert product_of(report).op == "DynamicQuantizeMatMul"
        assert product_of(report).precision_run == "int8"
    with pytest.raises(UnsupportedOperationError, match="computes in integers"):
        open_(model, "fp32", "strict")
    with pytest.warns(xrt.XpuRuntimeWarning, match="computes in integers"):
        session = open_(model, "fp32")
    with session:
        report = session.explain({"x": X}, runs=1)
    assert [(deviation.key, deviation.status) for deviation in report.deviations] == [
        ("execution.precision", "unsupported")
    ]


def quantized_pair(op: str, attributes: dict[str, Any], shapes: list[list[int]]) -> list[Any]:
    """Return an operator with QuantizeLinear and DequantizeLinear around its activations and its output."""
    nodes = []
    for index in range(len(shapes)):
        nodes.append(h.make_node("QuantizeLinear", [f"x{index}", "s", "z"], [f"q{index}"], name=f"q{index}"))
        nodes.append(h.make_node("DequantizeLinear", [f"q{index}", "s", "z"], [f"d{index}"], name=f"d{index}"))
    nodes.append(h.make_node(op, [f"d{i}" for i in range(len(shapes))], ["r"], name="product", **attributes))
    nodes.append(h.make_node("QuantizeLinear", ["r", "s", "z"], ["qr"], name="qr"))
    nodes.append(h.make_node("DequantizeLinear", ["qr", "s", "z"], ["y"], name="dr"))
    return nodes


IMAGE = [1, 4, 8, 8]
PAIRS: dict[str, tuple[str, dict[str, Any], list[list[int]]]] = {
    "Add": ("QLinearAdd", {}, [[5, 8], [5, 8]]),
    "Mul": ("QLinearMul", {}, [[5, 8], [5, 8]]),
    "MatMul": ("QLinearMatMul", {}, [[5, 8], [8, 6]]),
    "Sigmoid": ("QLinearSigmoid", {}, [[5, 8]]),
    "LeakyRelu": ("QLinearLeakyRelu", {}, [[5, 8]]),
    "Softmax": ("QLinearSoftmax", {}, [[5, 8]]),
    "AveragePool": ("QLinearAveragePool", {"kernel_shape": [2, 2]}, [IMAGE]),
    "GlobalAveragePool": ("QLinearGlobalAveragePool", {}, [IMAGE]),
    "Concat": ("QLinearConcat", {"axis": 0}, [[5, 8], [5, 8]]),
    "Conv": ("QLinearConv", {}, [IMAGE, [3, 4, 3, 3]]),
    "LayerNormalization": ("LayerNormalization", {}, [[5, 8], [8]]),
    "Tanh": ("Tanh", {}, [[5, 8]]),
}


@pytest.mark.parametrize("op", PAIRS)
def test_quantized_pairs(tmp_path: Path, op: str) -> None:
    """What the optimizer turns into integer operators is not fp32 under a policy that asks for it; the rest is."""
    fused, attributes, shapes = PAIRS[op]
    nodes = quantized_pair(op, attributes, shapes)
    inputs = [value(f"x{index}", shape) for index, shape in enumerate(shapes)]
    weights = {"s": np.float32(0.02), "z": np.uint8(128)}
    model = save(tmp_path / "m.onnx", nodes, inputs, [value("y", None)], weights)
    feeds = {f"x{i}": RNG.uniform(-1, 1, shape).astype(np.float32) for i, shape in enumerate(shapes)}
    reports = {}
    for precision, mode in (("model", "prefer"), ("int8", "strict")):
        with open_(model, precision, mode) as session:
            reports[precision] = session.explain(feeds, runs=1)
    with pytest.warns(xrt.XpuRuntimeWarning, match="fp32 is advisory"), open_(model, "fp32") as session:
        reports["fp32"] = session.explain(feeds, runs=1)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"state session.disable_quant_qdq: '1'"):
        open_(model, "fp32", "strict")
    with open_(model, "fp32", "strict", **{"session.disable_quant_qdq": "1"}) as session:
        floats = session.explain(feeds, runs=1)
    assert floats.honoured, floats.observations
    assert "uint8" not in {unit.precision_run for unit in floats.units if unit.op == op}
    unit = product_of(reports["fp32"])
    assert unit.op == fused
    integer = fused in OPERATORS
    assert unit.precision_run == ("uint8" if integer else "fp32")
    assert reports["model"].honoured, reports["model"].observations
    assert reports["fp32"].honoured == (not integer), reports["fp32"].observations
    if integer:
        (deviation,) = reports["fp32"].deviations
        assert deviation.key == "execution.precision"
        assert fused in deviation.reason
        assert reports["int8"].honoured, reports["int8"].observations


def test_every_quantized_operator_of_this_build_is_in_the_table() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    named = re.compile(r"(Q[A-Z]\w*|\w*Integer\w*|\w*NBits|\w*Bnb4|\w*FpQ4|\w*Quantize\w*)$")
    conversions = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QuickGelu", "QuantizeBFP"}
    conversions |= {"DequantizeBFP", "QuantizeWithOrder", "DequantizeWithOrder"}
    known = {one.name for one in get_all_operator_schema() if named.match(one.name)}
    assert {"QLinearConv", "MatMulNBits"} <= known
    assert known - conversions <= OPERATORS.keys()


@pytest.mark.filterwarnings("ignore:.*fp32 is advisory:xpuruntime.XpuRuntimeWarning")
@pytest.mark.parametrize("kind", [T.UINT8, T.INT8])
def test_a_pool_between_quantized_products_is_as_the_model_has_it(tmp_path: Path, kind: int) -> None:
    """ONNX Runtime pools and flattens the integers themselves; only a policy that asks for fp32 deviates."""

    def quantized(name: str) -> list[Any]:
        pair = ("QuantizeLinear", "DequantizeLinear")
        return [
            h.make_node(op, [f"{name}{'q' * i}", "s", "z"], [f"{name}{'q' * (i + 1)}"]) for i, op in enumerate(pair)
        ]

    nodes = [
        *quantized("x"),
        h.make_node("DequantizeLinear", ["w", "ws"], ["wf"]),
        h.make_node("Conv", ["xqq", "wf"], ["c"], name="conv"),
        *quantized("c"),
        h.make_node("MaxPool", ["cqq"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        *quantized("p"),
        h.make_node("Flatten", ["pqq"], ["f"], name="flatten"),
        *quantized("f"),
        h.make_node("Identity", ["fqq"], ["y"], name="last"),
    ]
    weights = {
        "w": RNG.integers(-128, 128, (4, 2, 3, 3)).astype(np.int8),
        "ws": np.float32(0.01).reshape(()),
        "s": np.float32(0.05).reshape(()),
        "z": h.make_tensor("z", kind, [], [128 if kind == T.UINT8 else 0]),
    }
    path = save(tmp_path / "q.onnx", nodes, [value("x", [1, 2, 6, 6])], [value("y", [1, 16])], weights)
    feeds = {"x": RNG.standard_normal((1, 2, 6, 6)).astype(np.float32)}
    for precision, honoured in (("model", True), ("fp32", False)):
        with xrt.InferenceSession(path, device="cpu", engine="onnxruntime", precision=precision) as session:
            report = session.explain(feeds, runs=1)
        pool = next(unit for unit in report.units if "pool" in unit.source_nodes)
        assert pool.precision_run in ("uint8", "int8"), "the pool of integers that this is about"
        assert report.honoured is honoured, str(report)


@pytest.mark.parametrize("op", ["ArgMax", "Reshape"])
def test_what_reads_or_makes_quantized_values_is_as_the_model_has_it(tmp_path: Path, op: str) -> None:
    """An ArgMax that reads integers, and a Reshape that ONNX Runtime quantizes before it, not behind it."""
    weights = {"s": np.float32(0.05).reshape(()), "z": h.make_tensor("z", T.UINT8, [], [128])}
    first = [
        h.make_node("QuantizeLinear", ["a", "s", "z"], ["q"]),
        h.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
    ]
    if op == "ArgMax":
        nodes = [h.make_node("Relu", ["x"], ["a"]), *first, h.make_node("ArgMax", ["d"], ["y"], name="it", axis=1)]
        output = value("y", [2, 1], T.INT64)
    else:
        weights |= {"k": np.array([-1, 16]), "w": RNG.integers(-128, 128, (16, 4)).astype(np.int8)}
        weights["ws"] = np.float32(0.01).reshape(())
        nodes = [
            h.make_node("Reshape", ["x", "k"], ["a"], name="it"),
            *first,
            h.make_node("DequantizeLinear", ["w", "ws"], ["wf"]),
            h.make_node("MatMul", ["d", "wf"], ["m"]),
            h.make_node("QuantizeLinear", ["m", "s", "z"], ["mq"]),
            h.make_node("DequantizeLinear", ["mq", "s", "z"], ["y"]),
        ]
        output = value("y", [2, 4])
    path = save(tmp_path / "q.onnx", nodes, [value("x", [2, 4, 4])], [output], weights)
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
        report = session.explain({"x": RNG.standard_normal((2, 4, 4)).astype(np.float32)}, runs=1)
    ran = next(unit.precision_run for unit in report.units if "it" in unit.source_nodes)
    assert ran in ("uint8", "uint8->int64"), "the integers that this is about"
    assert report.honoured, str(report)
