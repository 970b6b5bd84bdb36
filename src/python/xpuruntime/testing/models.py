# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Small ONNX models with known answers, built without any framework."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

_OPSET = 17
_IR = 10


def _weight(rng: np.random.Generator, name: str, *shape: int) -> onnx.TensorProto:
    from onnx import numpy_helper

    scale = 1.0 / math.sqrt(max(math.prod(shape[:-1]), 1))
    return numpy_helper.from_array((rng.standard_normal(shape) * scale).astype(np.float32), name)


def _model(graph: onnx.GraphProto, opset: int = _OPSET, domains: tuple[str, ...] = ()) -> onnx.ModelProto:
    from onnx import helper

    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR)


def mlp(width: int = 64, batch: int | str = "N", seed: int = 0) -> onnx.ModelProto:
    """Return ``y = relu(x @ w1) @ w2`` with `x` float32 [batch, width]; nodes ``mm1``, ``relu``, ``mm2``."""
    from onnx import TensorProto, helper

    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="mm1"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="mm2"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, width])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, width])]
    weights = [_weight(rng, "w1", width, width), _weight(rng, "w2", width, width)]
    return _model(helper.make_graph(nodes, "mlp", inputs, outputs, weights))


def conv(batch: int | str = "N", seed: int = 0) -> onnx.ModelProto:
    """Return a small residual convnet: `x` float32 [batch, 3, 32, 32] to `logits` [batch, 10]."""
    from onnx import TensorProto, helper

    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r1"], ["a"], name="add"),
        helper.make_node("GlobalAveragePool", ["a"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w3"], ["logits"], name="fc"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 32, 32])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 10])]
    weights = [_weight(rng, "w1", 16, 3, 3, 3), _weight(rng, "w2", 16, 16, 3, 3), _weight(rng, "w3", 16, 10)]
    return _model(helper.make_graph(nodes, "conv", inputs, outputs, weights))


def two_inputs() -> onnx.ModelProto:
    """Return ``total = a + b`` and ``product = a * b`` with float32 [N, 4] inputs that share the symbol N."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("Add", ["a", "b"], ["total"], name="add"),
        helper.make_node("Mul", ["a", "b"], ["product"], name="mul"),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("a", "b")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("total", "product")]
    return _model(helper.make_graph(nodes, "two_inputs", inputs, outputs))


def identity(dtype: str = "float32") -> onnx.ModelProto:
    """Return ``y = x`` for tensors [N, 3] of a NumPy dtype name (also ``"bool"``, ``"bfloat16"``, ``"string"``)."""
    from onnx import TensorProto, helper

    codes = {
        "float32": TensorProto.FLOAT,
        "float64": TensorProto.DOUBLE,
        "float16": TensorProto.FLOAT16,
        "bfloat16": TensorProto.BFLOAT16,
        "int8": TensorProto.INT8,
        "uint8": TensorProto.UINT8,
        "int32": TensorProto.INT32,
        "int64": TensorProto.INT64,
        "bool": TensorProto.BOOL,
        "string": TensorProto.STRING,
    }
    node = helper.make_node("Identity", ["x"], ["y"], name="identity")
    inputs = [helper.make_tensor_value_info("x", codes[dtype], ["N", 3])]
    outputs = [helper.make_tensor_value_info("y", codes[dtype], ["N", 3])]
    return _model(helper.make_graph([node], "identity", inputs, outputs))


def attention(heads: int = 8, length: int = 256, width: int = 64, *, half: bool = True) -> onnx.ModelProto:
    """Return one ``com.microsoft.MultiHeadAttention``: `q`, `k`, `v` [2, length, heads * width] to `y`."""
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["y"], name="attention", domain="com.microsoft", num_heads=heads
    )
    shape = [2, length, heads * width]
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name in "qkv"]
    outputs = [helper.make_tensor_value_info("y", kind, shape)]
    return _model(helper.make_graph([node], "attention", inputs, outputs), domains=("com.microsoft",))


def island(width: int = 16) -> onnx.ModelProto:
    """Return the sum of the distinct values of ``x @ w``: ``Unique`` has no CUDA kernel in ONNX Runtime."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"),
        helper.make_node("Unique", ["h"], ["u"], name="unique", sorted=1),
        helper.make_node("ReduceSum", ["u"], ["y"], name="sum", keepdims=1),
    ]
    weight = _weight(np.random.default_rng(0), "w", width, width)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    return _model(helper.make_graph(nodes, "island", inputs, outputs, [weight]))


def save(model: onnx.ModelProto, folder: Path, name: str = "model.onnx", *, external: bool = False) -> Path:
    """Write `model`; with `external`, weights of more than 64 bytes go to ``<name>.data`` beside it."""
    import onnx

    path = folder / name
    options: dict[str, Any] = {}
    if external:
        options = {"save_as_external_data": True, "location": f"{name}.data", "size_threshold": 64}
    onnx.save_model(model, str(path), **options)
    return path
