# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Precision and TF32 keys on ONNX Runtime, and the arithmetic of its quantized operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.engines.model.facts import dtype_name
from xpuruntime.engines.model.graph import graphs
from xpuruntime.engines.quantization.judge import quantizes
from xpuruntime.policies.call_facts import Glob

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.control_builder import ControlBuilder
    from xpuruntime.engines.model.info import ModelInfo
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings

#: Nodes that a control names.
_NAMED = 3


def resolve_precision(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    """Add the controls of ``execution.precision`` and ``execution.tf32``, and return the settings for them."""
    execution = request.policy.execution
    precision, tf32 = execution.precision, execution.tf32
    settings = _keep_activations(request, settings)
    if precision in ("fp16", "bf16"):
        settings = _half_precision(settings, builder, precision, cuda=cuda)
    elif precision == "int8":
        settings = _int8(request, settings, builder, cuda=cuda)
    elif precision == "fp32":
        _fp32(request, settings, builder, cuda=cuda)
    elif precision == "tf32":
        builder.add(
            "execution.precision",
            "use_tf32=1" if cuda else "-",
            "enforced" if cuda else "unsupported",
            "TF32 is allowed for fp32 matmul and conv" if cuda else "the CPU has no TF32",
        )
    else:
        builder.add("execution.precision", "the model's own types", "enforced", "nothing is converted")
    _integers(request, builder)
    _other_floats(request, builder)
    if cuda:
        allowed = tf32 if tf32 is not None else {"fp32": False, "tf32": True}.get(precision)
        if allowed is not None:
            settings = settings.with_options({"use_tf32": "1" if allowed else "0"})
        builder.add(
            "execution.tf32",
            f"use_tf32={settings.options.get('use_tf32', '1')}",
            "enforced",
            "provider option, read back after loading",
        )
    else:
        builder.add("execution.tf32", "-", "enforced" if tf32 is False else "unsupported", "the CPU has no TF32")
    return settings


def _half_precision(
    settings: OnnxRuntimeSettings, builder: ControlBuilder, precision: str, *, cuda: bool
) -> OnnxRuntimeSettings:
    settings = settings.replace(convert=precision)
    if cuda:
        builder.add(
            "execution.precision",
            f"graph converted to {precision}",
            "enforced",
            "the weights and types in the graph change, and a probe input is compared with fp32",
        )
    else:
        builder.add(
            "execution.precision",
            f"graph converted to {precision}",
            "advisory",
            "the CPU provider has few fp16 kernels and computes the other nodes in fp32 between casts; the graph "
            f"is optimized at level {settings.level}"
            + ("" if settings.level_stated else ", since fusions above it fail or crash on graphs with casts"),
            "use precision fp32, or a CUDA device, which has fp16 kernels",
        )
    return settings


def _fp32(request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool) -> None:
    """State what keeps the arithmetic in fp32; TF32 is switched off with ``execution.tf32``."""
    resolved = "use_tf32=0" if cuda else "the model's own types"
    if QDQ_LEVEL in settings.session:
        resolved += f", {QDQ_LEVEL}={settings.session[QDQ_LEVEL]}"
    reason = (
        "fp32 excludes TF32, which ONNX Runtime's CUDA provider uses by default"
        if cuda
        else "the CPU provider computes fp32 in fp32"
    )
    if not request.model.quantization.activations:
        builder.add("execution.precision", resolved, "enforced", reason)
    elif settings.session.get(QDQ_OFF) == "1":
        builder.add("execution.precision", f"{resolved}, {QDQ_OFF}=1", "enforced", reason)
    else:
        builder.add(
            "execution.precision",
            resolved,
            "advisory",
            f"{reason}, but ONNX Runtime may compute what stands between QuantizeLinear and DequantizeLinear in "
            "integers; the evidence names those nodes",
            f"state {QDQ_OFF}: '1' in execution.provider_options.onnxruntime, or precision model or int8",
        )


def _keep_activations(request: Request, settings: OnnxRuntimeSettings) -> OnnxRuntimeSettings:
    """Have products with dequantized weights computed in the type of their activations, unless int8 is asked for."""
    # ONNX Runtime fuses them into MatMulNBits, and by default quantizes the activations to int8.
    scheme, precision = request.model.quantization.scheme, request.policy.execution.precision
    kept = scheme == "weight_only" if precision == "model" else precision != "int8"
    ops = {name.rpartition(":")[2] for name in request.model.ops}
    if kept and "DequantizeLinear" in ops and ops & {"MatMul", "Gemm"}:
        return on_unless_stated(settings, QDQ_LEVEL)
    return settings


def _integers(request: Request, builder: ControlBuilder) -> None:
    if request.policy.execution.precision in ("model", "int8") or not (named := integer_nodes(request)):
        return
    for index, control in enumerate(builder.controls):
        if control.key == "execution.precision":
            builder.controls[index] = msgspec.structs.replace(
                control,
                enforceability="unsupported",
                reason=f"the model itself computes in integers, whatever the policy says: {named}",
                fix="state precision model or int8, or give the model as it was before it was quantized",
            )


def _other_floats(request: Request, builder: ControlBuilder) -> None:
    if request.policy.execution.precision not in ("fp32", "tf32") or request.artifact is not None:
        return
    from xpuruntime.engines.precision.types import other_floats

    named = other_floats(request.model, ("fp64", "fp16", "bf16"))
    for index, control in enumerate(builder.controls if named else ()):
        if control.key == "execution.precision" and control.enforceability == "enforced":
            builder.controls[index] = msgspec.structs.replace(
                control,
                enforceability="unsupported",
                reason=f"the model itself computes in other types, whatever the policy says: {named}",
                fix="state precision model, or export the model in float32",
            )


def resolve_weights(request: Request, builder: ControlBuilder, *, cuda: bool) -> None:
    """Add the controls of ``execution.weights``: what the graph states of its products, since nothing is converted."""
    claimed = request.policy.execution.weights
    if claimed.storage is None:
        return
    kept = [Glob(pattern) for pattern in claimed.exclude]
    products = [
        product
        for product in _packed_products(request.model, cuda=cuda)
        if not any(glob(product.node) for glob in kept)
    ]
    for key in ("storage", "compute", "group", "exclude"):
        wanted, name = getattr(claimed, key), f"execution.weights.{key}"
        if key == "exclude":
            builder.add(name, "-", "enforced", "these products are not compared")
            continue
        other = [
            f"{product.node!r} ({getattr(product, key)})" for product in products if getattr(product, key) != wanted
        ]
        told = ", ".join(other[:_NAMED]) + (f" and {len(other) - _NAMED} more" if len(other) > _NAMED else "")
        if products and not other:
            builder.add(
                name, f"{wanted} in {len(products)} products", "enforced", "the graph states it of each product"
            )
        else:
            reason = (
                f"{len(other)} of {len(products)} products differ: {told}"
                if products
                else "the graph has no such product"
            )
            fix = f"leave {name} out, or give a model that was quantized so; nothing is converted here"
            builder.add(name, "the graph's own weights", "unsupported", reason, fix)


class _PackedProduct(msgspec.Struct, frozen=True):
    node: str
    storage: str
    compute: str
    group: int | None


def _packed_products(model: ModelInfo, *, cuda: bool) -> Iterator[_PackedProduct]:
    for graph in graphs(model.named_proto()):
        types = {tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer}
        dequantized = {
            node.output[0]: types[node.input[0]]
            for node in graph.node
            if node.op_type == "DequantizeLinear" and node.input[0] in types
        }
        for node in graph.node:
            if node.op_type == "MatMulNBits":
                numbers = {str(attribute.name): int(attribute.i) for attribute in node.attribute}
                integers = not cuda and quantizes_activations(node.op_type, numbers)
                storage, group = f"int{numbers.get('bits', 4)}", numbers.get("block_size")
                yield _PackedProduct(node.name, storage, "int8" if integers else "float", group)
            elif node.op_type in ("MatMul", "Gemm"):
                for name in node.input[:2]:
                    if name in dequantized:
                        yield _PackedProduct(node.name, dequantized[name].removeprefix("u"), "as it is fused", None)
                    elif name in types:
                        yield _PackedProduct(node.name, types[name], "float", None)


def integer_nodes(request: Request) -> str:
    """Return some of the nodes that the model itself states to multiply in integers; empty where there are none."""
    model = request.model
    ops = {name.rpartition(":")[2] for name in model.ops}
    if not ops & OPERATORS.keys():
        return ""
    named = [f"{node.name!r} ({node.op})" for node in model.nodes if node.op in INTEGER_OPS]
    if "MatMulNBits" in ops:
        for graph in graphs(model.named_proto()):
            for node in graph.node:
                numbers = {str(attribute.name): int(attribute.i) for attribute in node.attribute}
                if node.op_type == "MatMulNBits" and quantizes_activations(node.op_type, numbers):
                    named.append(f"{node.name!r} (MatMulNBits, accuracy_level 4)")
    return ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")


def _int8(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    if quantizes(request):
        settings = settings.replace(qdq="ort-cuda" if cuda else "ort-cpu")
        resolved = f"graph quantized from {request.calibration.count} calibration samples"
    else:
        resolved = f"the model's own quantization ({request.model.quantization.scheme})"
    if cuda:
        builder.add(
            "execution.precision",
            resolved,
            "advisory",
            "the CUDA provider rounds values to int8 and back, and computes convolutions and products in floats",
            "use engine tensorrt, which computes int8, or precision fp16, which is faster here",
        )
    elif settings.qdq is not None:
        reason = "convolutions and products with constant weights become integer operators; the report has the others"
        builder.add("execution.precision", resolved, "enforced", reason)
    else:
        builder.add("execution.precision", resolved, "enforced", "nothing is converted")
    return settings


def on_unless_stated(settings: OnnxRuntimeSettings, entry: str) -> OnnxRuntimeSettings:
    """Return the settings with a session entry switched on, unless the policy states it."""
    return settings if entry in settings.session else settings.with_session({entry: "1"})


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
