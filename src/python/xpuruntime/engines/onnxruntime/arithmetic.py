# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The arithmetic of ONNX Runtime's quantized operators: the precision that each kernel multiplies in.

Types of tensors do not tell it: ``DynamicQuantizeMatMul`` reads and writes fp32 and multiplies int8. The table covers
operators that models state and those that ONNX Runtime's optimizer makes; every other operator computes in the type of
its tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["INTEGER_OPS", "OPERATORS", "QDQ_LEVEL", "QDQ_OFF", "Arithmetic", "arithmetic_of", "quantizes_activations"]

#: The session option that chooses the arithmetic of DequantizeLinear and MatMul fused into MatMulNBits: 4, the default,
#: quantizes activations to int8; 1 keeps fp32.
QDQ_LEVEL = "session.qdq_matmulnbits_accuracy_level"
#: The session option that leaves QuantizeLinear and DequantizeLinear as they are, so that the rest computes in floats.
QDQ_OFF = "session.disable_quant_qdq"

#: `integer`: the operands are integers already. `dynamic`: float activations are quantized to int8 inside. `level`: by
#: the attribute ``accuracy_level``, see `_INT8_LEVEL`. `dequantized`: weights are dequantized to the type of the
#: activations. `unknown`: it differs between builds and sizes, and is not reported.
Arithmetic = Literal["integer", "dynamic", "level", "dequantized", "unknown"]

OPERATORS: dict[str, Arithmetic] = {
    "ConvInteger": "integer",
    "MatMulInteger": "integer",
    "MatMulInteger16": "integer",
    "MatMulIntegerToFloat": "integer",
    "MulInteger": "integer",
    "QAttention": "integer",
    "QGemm": "integer",
    "QLinearAdd": "integer",
    "QLinearAveragePool": "integer",
    "QLinearConcat": "integer",
    "QLinearConv": "integer",
    "QLinearConvTranspose": "integer",
    "QLinearGlobalAveragePool": "integer",
    "QLinearLeakyRelu": "integer",
    "QLinearMatMul": "integer",
    "QLinearMul": "integer",
    "QLinearReduceMean": "integer",
    "QLinearSigmoid": "integer",
    "QLinearSoftmax": "integer",
    "QLinearWhere": "integer",
    "QOrderedAttention": "integer",
    "QOrderedGelu": "integer",
    "QOrderedLayerNormalization": "integer",
    "QOrderedLongformerAttention": "integer",
    "QOrderedMatMul": "integer",
    "ReduceSumInteger": "integer",
    "DynamicQuantizeLSTM": "dynamic",
    "DynamicQuantizeMatMul": "dynamic",
    "MatMulNBits": "level",
    "GatherBlockQuantized": "dequantized",
    "MatMulBnb4": "dequantized",
    "MatMulFpQ4": "dequantized",
    "QEmbedLayerNormalization": "dequantized",
    "MatMulBlockQuantizedFp4Weight": "unknown",
    "MatMulBlockQuantizedFp8Weight": "unknown",
    "QMoE": "unknown",
}

#: Operators that multiply integers whatever their attributes say.
INTEGER_OPS = frozenset(op for op, kind in OPERATORS.items() if kind in ("integer", "dynamic"))

#: The ``accuracy_level`` of MatMulNBits at which the CPU provider quantizes activations to int8. At 0 to 3 it
#: multiplies in fp32, and the CUDA provider in the type of the activations at every level.
_INT8_LEVEL = 4
_EIGHT_AND_16 = ("uint8", "int8", "uint16", "int16")


def arithmetic_of(
    op: str, provider: str, inputs: Iterable[str | None], numbers: Mapping[str, int] | None
) -> str | None:
    """Return the precision in which a kernel multiplies, where its tensors do not tell."""
    kind = OPERATORS.get(op)
    if kind is None:
        return None
    known = [name for name in inputs if name]
    if kind == "integer":
        return next((name for name in known if name in _EIGHT_AND_16), "int8")
    if kind == "dynamic":
        return "int8"
    if kind == "unknown" or (kind == "level" and numbers is None):
        return "unknown"
    if kind == "level" and provider == "CPUExecutionProvider" and (numbers or {}).get("accuracy_level") == _INT8_LEVEL:
        return "int8"
    return next((name for name in known if name.startswith(("fp", "bf"))), None)


def quantizes_activations(op: str, numbers: Mapping[str, int]) -> bool:
    """Whether a node of a model states that its activations are integers, or become such."""
    if op in ("QuantizeLinear", "DynamicQuantizeLinear") or op in INTEGER_OPS:
        return True
    return OPERATORS.get(op) == "level" and numbers.get("accuracy_level", 0) == _INT8_LEVEL
