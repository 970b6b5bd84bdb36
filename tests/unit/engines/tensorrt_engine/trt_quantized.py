# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A convolution between Q and DQ, in the forms that quantizers write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    import onnx


def qdq(*, bias: str = "float32", activations: str = "int8", weights: str = "int8", zero: int = 0) -> onnx.ModelProto:
    """Return ``x`` float32 [1, 3, 16, 16] to ``y`` [1, 8, 16, 16]: one convolution with a scale for each channel."""
    rng = np.random.default_rng(0)
    kernel = rng.integers(0 if weights == "uint8" else -100, 100, (8, 3, 3, 3)).astype(weights)
    constants = {
        "s": np.float32(0.05),
        "z": np.asarray(zero, activations),
        "wq": kernel,
        "ws": np.full(8, 0.01, np.float32),
        "wz": np.zeros(8, weights),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], name="quantize_x"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], name="dequantize_x"),
        helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], name="dequantize_w", axis=0),
    ]
    if bias == "int32":
        constants |= {"bq": np.ones(8, np.int32), "bs": np.full(8, 5e-4, np.float32), "bz": np.zeros(8, np.int32)}
        nodes.append(helper.make_node("DequantizeLinear", ["bq", "bs", "bz"], ["b"], name="dequantize_b", axis=0))
    else:
        constants["b"] = np.ones(8, np.float32)
    nodes += [
        helper.make_node("Conv", ["xd", "wd", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"], name="quantize_y"),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["y"], name="dequantize_y"),
    ]
    graph = helper.make_graph(
        nodes,
        "qdq",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 16, 16])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
