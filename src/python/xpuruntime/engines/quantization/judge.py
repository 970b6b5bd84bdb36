# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Judgement of int8: whether model, calibration and processor can meet a request, and what it is tied to.

8-bit products of x86 processors without VNNI saturate: they add pairs of products in 16 bits. The largest pair,
255 * 127 + 255 * 127, does not fit and is cut off, without an error. Weights of at most 64 in magnitude fit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import Refusal, Request
from xpuruntime.evidence.records import VerdictCode

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.policies import Policy

#: Precisions whose sessions are probed, which a calibration gives the input for.
CONVERTED = ("fp16", "bf16")
_PASS = (
    "pass calibration= (on the command line: --calibration PATH), an .npz file, a folder, or an iterable of inputs "
    "like those the model will get, some tens to some hundreds; or load a model that is quantized already"
)


def quantizes(request: Request) -> bool:
    """Whether the model of a request is to be quantized here: int8 asked, float given, and no artifact made of it."""
    return (
        request.policy.execution.precision == "int8"
        and request.model.quantization.scheme == "none"
        and request.artifact is None
    )


def uses_calibration(policy: Policy, model: ModelInfo) -> bool:
    """Whether a session of a model quantizes with calibration inputs, or is probed with the first of them."""
    precision = policy.execution.precision
    if precision in CONVERTED or policy.accuracy is not None:
        return True
    return precision == "int8" and model.quantization.scheme == "none"


def refuse_int8(request: Request) -> Refusal | None:
    """Return why int8 cannot go on, or ``None`` where it can.

    Every engine that has int8 calls it from `judge`. Pure.

    * int8 is asked for, the model is in floats and there is no calibration: ``calibration_missing``.
    * There is a calibration, and nothing to use it for: nothing is converted and no accuracy is stated, or the model is
      quantized already: ``calibration_unused``. Nothing that was given is ignored: where nothing is quantized, the
      first input is that of the accuracy probe.
    """
    precision = request.policy.execution.precision
    scheme = request.model.quantization.scheme
    if request.calibration is None:
        if quantizes(request):
            return Refusal(
                VerdictCode.CALIBRATION_MISSING,
                "precision int8 was asked for, and the model computes in floating point",
                _PASS,
            )
        return None
    if request.artifact is not None:  # the artifact is tied to the calibration by its digest
        return None
    if request.purpose == "search" or uses_calibration(request.policy, request.model):
        return None
    if precision != "int8":
        return Refusal(
            VerdictCode.CALIBRATION_UNUSED,
            f"a calibration was given, and precision is {precision}: nothing is quantized or probed",
            "state precision int8, fp16 or bf16, or an accuracy, or leave calibration= out",
        )
    return Refusal(
        VerdictCode.CALIBRATION_UNUSED,
        f"a calibration was given, and the model is quantized already ({scheme})",
        "leave calibration= out, or give the float model",
    )


def calibration_digest(request: Request) -> str | None:
    """Return a digest of the inputs that a request quantizes with, or ``None`` where it has none."""
    if request.calibration is None or request.policy.execution.precision != "int8":  # else it is for the probe alone
        return None
    return str(request.calibration.digest)


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
