# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Refusals of TensorRT, made before anything is built: devices, types, operators, quantisation, open shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.model.shapes import open_dimensions, shape_ranges
from xpuruntime.engines.refusal import Refusal, missing_cuda_device
from xpuruntime.engines.tensorrt.products import compute_capabilities
from xpuruntime.evidence.verdict_codes import VerdictCode

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.tensorrt.products import TensorRtProduct
    from xpuruntime.runtime.machine import EngineFacts, Machine

__all__ = ["capability_of", "refuse_device", "refuse_engine", "refuse_kind", "refuse_model", "refuse_shapes"]

#: Types of inputs and outputs that both sides have, and that keep their meaning.
_ARRAYS = frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"})
#: Types that the parser takes in quantised graphs.
_QUANTISED = frozenset({"int8", "int4", "float8e4m3fn", "float4e2m1", "float8e8m0"})
_OLDEST_CHIP = (7, 5)


def capability_of(request: Request, machine: Machine) -> str | None:
    """Return the compute capability of the device asked for, such as ``"9.0"``; ``None`` when it is not there."""
    index = int(request.device.partition(":")[2] or 0)
    return next(
        (f"{d.compute_capability[0]}.{d.compute_capability[1]}" for d in machine.cuda if d.index == index), None
    )


def refuse_kind(request: Request, machine: Machine, product: TensorRtProduct) -> Refusal | None:
    """Refuse what is no CUDA device, or is not there, whatever is installed.

    A request to compile needs the GPU only where the builder times kernels on it.
    """
    if request.device.partition(":")[0] != "cuda":
        return Refusal(
            VerdictCode.DEVICE_UNSUPPORTED, f"{product.title} has no device {request.device!r}; it runs on cuda:N"
        )
    if capability_of(request, machine) is not None or (request.purpose == "compile" and product.jit):
        return None
    refusal = missing_cuda_device(request.device, machine)
    if refusal is not None and request.purpose == "compile" and not machine.cuda:
        reason = f"{refusal.reason}; {product.title} times kernels on the GPU while it builds"
        return Refusal(
            VerdictCode.DEVICE_MISSING, reason, "build on a machine with that GPU, or with engine tensorrt-rtx"
        )
    return refusal


def refuse_engine(product: TensorRtProduct, facts: EngineFacts | None) -> Refusal | None:
    """Refuse where the package is missing or broken."""
    if facts is None or facts.version is None:
        return Refusal(VerdictCode.ENGINE_MISSING, f"{product.title} is not installed", product.install)
    if not facts.loadable:
        return Refusal(VerdictCode.ENGINE_BROKEN, facts.reason or f"{product.title} does not load", facts.fix)
    return None


def refuse_device(request: Request, machine: Machine, product: TensorRtProduct, facts: EngineFacts) -> Refusal | None:
    """Refuse a device that is too old or too new for this product."""
    chip = capability_of(request, machine)
    if chip is None:
        return None
    if request.purpose != "compile" and not machine.core_cuda:
        return Refusal(
            VerdictCode.LIBRARY_MISSING,
            "xpuruntime itself was built without CUDA, so it cannot order work on a stream",
            "put nvcc on PATH and reinstall xpuruntime",
        )
    known = compute_capabilities(facts)
    if product.jit and known and chip not in known and request.purpose != "compile":
        return Refusal(
            VerdictCode.DEVICE_UNSUPPORTED,
            f"{request.device} has compute capability {chip}, and {product.title} {facts.version} has kernels for "
            f"{', '.join(known)} only",
            "use engine tensorrt or onnxruntime on this GPU",
        )
    if not product.jit and tuple(map(int, chip.split("."))) < _OLDEST_CHIP:
        return Refusal(
            VerdictCode.DEVICE_UNSUPPORTED,
            f"{request.device} has compute capability {chip}, and {product.title} needs 7.5 or newer",
            "use engine onnxruntime on this GPU",
        )
    return None


def refuse_model(request: Request, product: TensorRtProduct) -> Refusal | None:
    """Refuse types, operators and quantised graphs that TensorRT takes wrongly, or not at all."""
    model = request.model
    for role, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            if tensor.kind != "tensor":
                reason = f"{role} {tensor.name!r} is a {tensor.kind}, and {product.title} has tensors only"
                return Refusal(VerdictCode.OP_UNSUPPORTED, reason, "use engine onnxruntime")
            if tensor.dtype not in _ARRAYS:
                reason = f"{role} {tensor.name!r} is {tensor.dtype}, which {product.title} does not take"
                if tensor.dtype == "float64":
                    reason = f"{role} {tensor.name!r} is float64, and {product.title} would read its memory as float32"
                return Refusal(
                    VerdictCode.OP_UNSUPPORTED, reason, f"put a Cast at this {role} into the model, such as to float32"
                )
            if role == "input" and tensor.shape is None:
                reason = f"the rank of input {tensor.name!r} is not known, and {product.title} needs it"
                if tensor.name not in request.policy.execution.shapes:
                    return Refusal(
                        VerdictCode.SHAPES_OPEN, reason, f"state execution.shapes: {{{tensor.name}: [<dimensions>]}}"
                    )
    if model.custom_domains:
        named = "; ".join(f"{domain}: {', '.join(ops)}" for domain, ops in model.custom_domains.items())
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"the model has operators outside the standard ({named}). The vendor's parser does not look at the domain "
            "of a node: it would compute a standard operator of the same name, or ask for a plugin",
            "export the model without them, or use engine onnxruntime",
        )
    return _refuse_quantised(request, product)


def _refuse_quantised(request: Request, product: TensorRtProduct) -> Refusal | None:
    from xpuruntime.engines.quantisation.judge import refuse_int8

    refused = refuse_int8(request)
    if refused is not None:
        return refused
    quantised = request.model.quantisation
    if quantised.scheme == "none":
        return None
    if quantised.scheme in ("qoperator", "dynamic"):
        what = (
            "integer operators" if quantised.scheme == "qoperator" else "activations that are quantised while running"
        )
        reason = f"the model is quantised with {what}, and {product.title} takes Q/DQ pairs only"
        return Refusal(
            VerdictCode.OP_UNSUPPORTED, reason, "quantise the float model in the QDQ form, or pass calibration="
        )
    if "int32" in quantised.weights:
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"the model has biases stored as int32 behind a DequantizeLinear, which {product.title} does not take: it "
            "wants biases in floating point",
            "quantise the float model for this engine: precision int8 with calibration=, which leaves biases alone",
        )
    foreign = sorted({*quantised.activations, *quantised.weights} - _QUANTISED)
    if foreign:
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"the model is quantised to {', '.join(foreign)}, and {product.title} takes int8 with zero points of 0",
            "quantise the float model for this engine: precision int8 with calibration=",
        )
    return None


def refuse_shapes(request: Request, product: TensorRtProduct) -> Refusal | None:
    """Refuse inputs with dimensions of which neither model nor policy says how large they get."""
    ranges = shape_ranges(request.model, request.policy)
    left = {name: shape for name, shape in open_dimensions(request.model).items() if name not in ranges}
    if not left:
        return None
    named = ", ".join(f"{name} {shape}" for name, shape in left.items())
    wanted = ", ".join(f"{name}: {_as_ranges(shape)}" for name, shape in left.items())
    return Refusal(
        VerdictCode.SHAPES_OPEN,
        f"{product.title} builds for sizes that are known beforehand, and the model leaves some open: {named}",
        f"state them, as sizes or ranges: execution.shapes: {{{wanted}}}",
    )


def _as_ranges(shape: str) -> str:
    """Return a shape with ``<N>`` as a policy may state it: ``'1..<largest N>'``."""
    sizes = shape.strip("[]").split(", ")
    return "[" + ", ".join(f"'1..<largest {s[1:-1]}>'" if s.startswith("<") else s for s in sizes) + "]"
