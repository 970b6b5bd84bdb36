# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Saturation: 8-bit products of x86 processors without VNNI, which add pairs of products in 16 bits.

The largest pair, 255 * 127 + 255 * 127, does not fit and is cut off, without an error. Weights of at most 64 in
magnitude fit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

#: Product to the place of its weight among its inputs, and, for those that read floats, of its activation.
_INTEGER = {"ConvInteger": 1, "MatMulInteger": 1, "QLinearConv": 3, "QLinearMatMul": 3}
_CONTRIBUTED = {"DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1, "QAttention": 1, "QGemm": 3}
_FLOAT = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_FITS = 64
#: ``TensorProto.INT8``.
_INT8 = 3


def saturates_on(features: Collection[str]) -> bool:
    """Whether a processor with these features cuts off sums of 8-bit products; without a list of them, it may not."""
    return "avx2" in features and not {"avx_vnni", "avx512_vnni"}.intersection(features)


def saturating_nodes(model: ModelInfo) -> list[str]:
    """Return the products of a quantized model whose int8 weights are too large for such a processor.

    Weights that are kept outside of the file are not read.
    """
    if "int8" not in model.weights or model.quantization.scheme in ("none", "weight_only"):
        return []
    import numpy as np
    from onnx import numpy_helper

    from xpuruntime.engines.model.graph import graphs

    nodes: list[str] = []
    for graph in graphs(model.named_proto()):
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == _INT8}
        for node in graph.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                if attribute.name == "value" and attribute.t.data_type == _INT8:
                    tensors[node.output[0]] = attribute.t
        large = {
            name
            for name, tensor in tensors.items()
            if tensor.data_location != 1
            and np.abs(numpy_helper.to_array(tensor).astype(np.int16)).max(initial=0) > _FITS
        }
        if not large:
            continue
        makers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            if node.op_type in (*_INTEGER, *_CONTRIBUTED):
                position = {**_INTEGER, **_CONTRIBUTED}[node.op_type]
                weight = node.input[position] if len(node.input) > position else ""
            elif node.op_type in _FLOAT and _dequantized(makers, node.input[0]):
                weight = _dequantized(makers, node.input[1])
            else:
                continue
            if weight in large:
                nodes.append(str(node.name))
    return nodes


def _dequantized(makers: dict[str, Any], name: str) -> str:
    node = makers.get(name)
    if node is not None and node.op_type == "Transpose":
        node = makers.get(node.input[0])
    return str(node.input[0]) if node is not None and node.op_type == "DequantizeLinear" else ""
