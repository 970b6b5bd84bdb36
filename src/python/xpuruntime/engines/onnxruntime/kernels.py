# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operators of the ONNX standard that ONNX Runtime's CUDA provider computes in bfloat16."""

from __future__ import annotations

__all__ = ["CUDA_BF16_OPS"]

#: Found by opening a model of one operator for each (opset 23, bfloat16, CPU provider off) with ONNX Runtime 1.31.1 on
#: an H200. What is not here stays in fp32, between casts, and the report says so.
CUDA_BF16_OPS: frozenset[str] = frozenset(
    {
        "Abs",
        "Add",
        "Attention",
        "AveragePool",
        "Concat",
        "Conv",
        "Cos",
        "Div",
        "Erf",
        "Exp",
        "Expand",
        "Flatten",
        "Gather",
        "Gelu",
        "Gemm",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "IsNaN",
        "LayerNormalization",
        "LpNormalization",
        "MatMul",
        "Max",
        "Min",
        "Mish",
        "Mod",
        "Mul",
        "Neg",
        "Pow",
        "RMSNormalization",
        "ReduceMean",
        "ReduceSum",
        "Relu",
        "Reshape",
        "ScatterND",
        "Sigmoid",
        "Sin",
        "Slice",
        "Softmax",
        "Softplus",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Tanh",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    }
)
