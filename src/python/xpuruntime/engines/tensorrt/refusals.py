# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Refusals of TensorRT, made before anything is built: devices, types, operators, quantization, open shapes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.base import Compiled, Refusal, Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.shapes import open_dimensions, shape_ranges
from xpuruntime.engines.tensorrt.building import Built, build
from xpuruntime.engines.tensorrt.network import logger
from xpuruntime.engines.tensorrt.options import TensorRtProduct, TensorRtSettings, bindings, compute_capabilities
from xpuruntime.errors import EngineError, ModelError, UnsupportedOperationError
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.files.reading import decode_json

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.runtime.machine import Machine

#: Types of inputs and outputs that both sides have, and that keep their meaning.
_ARRAYS = frozenset({"float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"})
#: Types that the parser takes in quantized graphs.
_QUANTIZED = frozenset({"int8", "int4", "float8e4m3fn", "float4e2m1", "float8e8m0"})
_OLDEST_CHIP = (7, 5)


def capability_of(request: Request, machine: Machine) -> str | None:
    """Return the compute capability of the device asked for, such as ``"9.0"``; ``None`` when it is missing."""
    index = int(request.device.partition(":")[2] or 0)
    return next(
        (f"{d.compute_capability[0]}.{d.compute_capability[1]}" for d in machine.cuda if d.index == index), None
    )


def refuse_missing(refusal: Refusal, request: Request, machine: Machine, product: TensorRtProduct) -> Refusal | None:
    """Return a refusal of a device with what building has to do with it, or ``None`` where it needs no GPU."""
    compiles = refusal.code is VerdictCode.DEVICE_MISSING and request.purpose == "compile"
    if compiles and product.jit:
        return None
    if compiles and not machine.cuda:
        reason = f"{refusal.reason}; {product.title} times kernels on the GPU while it builds"
        return Refusal(
            VerdictCode.DEVICE_MISSING, reason, "build on a machine with that GPU, or with engine tensorrt-rtx"
        )
    return refusal


def refuse_chip(request: Request, machine: Machine, product: TensorRtProduct) -> Refusal | None:
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
    facts = machine.engines[product.name]
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
    """Refuse types, operators and quantized graphs that TensorRT takes wrongly, or not at all."""
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
    return _refuse_quantized(request, product)


def _refuse_quantized(request: Request, product: TensorRtProduct) -> Refusal | None:
    from xpuruntime.engines.quantization.judge import refuse_int8

    refused = refuse_int8(request)
    if refused is not None:
        return refused
    quantized = request.model.quantization
    if quantized.scheme == "none":
        return None
    if quantized.scheme in ("qoperator", "dynamic"):
        what = (
            "integer operators" if quantized.scheme == "qoperator" else "activations that are quantized while running"
        )
        reason = f"the model is quantized with {what}, and {product.title} takes Q/DQ pairs only"
        return Refusal(
            VerdictCode.OP_UNSUPPORTED, reason, "quantize the float model in the QDQ form, or pass calibration="
        )
    if "int32" in quantized.weights:
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"the model has biases stored as int32 behind a DequantizeLinear, which {product.title} does not take: it "
            "wants biases in floating point",
            "quantize the float model for this engine: precision int8 with calibration=, which leaves biases alone",
        )
    foreign = sorted({*quantized.activations, *quantized.weights} - _QUANTIZED)
    if foreign:
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"the model is quantized to {', '.join(foreign)}, and {product.title} takes int8 with zero points of 0",
            "quantize the float model for this engine: precision int8 with calibration=",
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


_AMPERE_PLUS = "8.0 and newer"


def describe_target(
    request: Request, settings: TensorRtSettings, machine: Machine, product: TensorRtProduct
) -> dict[str, str]:
    """Return what an engine made from `settings` is tied to.

    Of an engine for several compute capabilities, the entry names all of them, also when it is loaded on one of them.
    """
    chip = capability_of(request, machine)
    facts = machine.engines[product.name]
    if settings.targets:
        chips = " ".join(settings.targets)
    elif settings.options.get("hardware_compatibility") == "ampere_plus" and _is_ampere(chip):
        chips = _AMPERE_PLUS
    else:
        chips = chip or "unknown"
    windows = settings.options.get("runtime_platform") == "windows_amd64"
    precision = "int8" if settings.quantize else settings.convert or "as in the model"
    return {
        "flavour": product.name,
        "version": facts.version or "unknown",
        "compute_capability": chips,
        "platform": "Windows AMD64" if windows else f"{machine.system} {machine.architecture}",
        "precision": precision,
        "tf32": str(int(settings.tf32)),
    }


def refuse_artifact(request: Request, machine: Machine, product: TensorRtProduct) -> Refusal | None:
    """Refuse an artifact of another product, or one that has no code for the GPU asked for."""
    if request.artifact is None:
        return None
    manifest = request.artifact.manifest
    target, made_by = manifest.target, manifest.target.get("flavour", manifest.engine)
    if made_by != product.name:
        reason = f"the artifact is an engine of {made_by}, which {product.title} does not read"
        return Refusal(VerdictCode.ARTIFACT_FOREIGN, reason, f"load it with engine {made_by}, or compile it again")
    chip = capability_of(request, machine)
    chips = target.get("compute_capability", "")
    fits = chip in chips.split() or (chips == _AMPERE_PLUS and _is_ampere(chip))
    if chip is None or fits:
        return None
    return Refusal(
        VerdictCode.ARTIFACT_FOREIGN,
        f"the artifact was built for compute capability {', '.join(chips.split()) if product.jit else chips}, and "
        f"{request.device} is {chip}",
        "load it on such a GPU, or compile it again for this one",
    )


def _is_ampere(chip: str | None) -> bool:
    return chip is not None and int(chip.partition(".")[0]) >= 8


PLAN, RECORD = "engine.plan", "record.json"
SCHEMA = "xpuruntime.tensorrt/1"
_AGAIN = "compile the model again: xrt compile MODEL -o FOLDER"
#: `EngineInvalidityDiagnostics.MALFORMED_ENGINE`: found in the header alone, also without a GPU.
_MALFORMED = "MALFORMED_ENGINE"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan was made from; the plan itself says none of it."""

    target: dict[str, str]
    flags: dict[str, str]
    layers: dict[str, tuple[str, ...]]
    regions: dict[str, tuple[str, ...]] = {}
    size: int
    sha256: str
    schema: str = SCHEMA

    @classmethod
    def of(cls, built: Built, target: dict[str, str]) -> Record:
        """Return the record of what was built."""
        digest = hashlib.sha256(built.plan).hexdigest()
        size = len(built.plan)
        return cls(
            target=target, flags=built.flags, layers=built.layers, regions=built.regions, size=size, sha256=digest
        )

    def nodes(self, model: ModelInfo) -> dict[str, tuple[str, ...]]:
        """Return every node that the parser may have seen, with the source nodes that it stands for."""
        return {**{node.name: (node.name,) for node in model.nodes}, **self.regions}


class SerializedEngine(NamedTuple):
    """A plan and its record."""

    plan: bytes
    record: Record


def write_artifact(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], folder: Path
) -> Compiled:
    """Build an engine and write it into `folder`, and read it back."""
    if settings.options.get("strip_plan") == "1":
        msg = (
            "strip_plan leaves the weights out, and an artifact has to have them. Fix: leave the option out to compile"
        )
        raise UnsupportedOperationError(msg, engine=product.name, device=request.device)
    log = ConversionLog()
    built = build(request, settings, product, target, log)
    record = Record.of(built, target)
    (folder / PLAN).write_bytes(built.plan)
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    _read(folder, product)
    return Compiled(files=(PLAN, RECORD), node_map=built.layers, notes=log.notes())


def read_artifact(artifact: Artifact, product: TensorRtProduct, target: dict[str, str]) -> SerializedEngine:
    """Read a compiled engine and check it against its record and against what is here."""
    ready = _read(artifact.folder, product)
    recorded = ready.record.target
    differences = [
        f"{key} {recorded.get(key)}, and here is {target.get(key)}"
        for key in sorted({*recorded, *target})
        if recorded.get(key) != target.get(key)
    ]
    if differences:
        msg = f"the engine in {artifact.folder} was made for {'; for '.join(differences)}. Fix: {_AGAIN}"
        raise EngineError(msg, engine=product.name)
    return ready


def _read(folder: Path, product: TensorRtProduct) -> SerializedEngine:
    def damaged(why: str) -> ModelError:
        return ModelError(f"the engine in {folder} cannot be used: {why}. Fix: {_AGAIN}", engine=product.name)

    try:
        record = decode_json((folder / RECORD).read_bytes(), Record)
        plan = (folder / PLAN).read_bytes()
    except OSError as error:
        raise damaged(f"{error.filename} cannot be read ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise damaged(f"{RECORD} is damaged ({error})") from None
    if record.schema != SCHEMA:
        raise damaged(f"its record has the schema {record.schema}, and this version reads {SCHEMA}")
    if len(plan) != record.size:
        raise damaged(f"{PLAN} has {len(plan)} bytes, and its record says {record.size}")
    if hashlib.sha256(plan).hexdigest() != record.sha256:
        raise damaged(f"{PLAN} was changed after it was written")
    why = malformed(bindings(product), plan)
    if why is not None:
        raise damaged(why)
    return SerializedEngine(plan, record)


def malformed(trt: Any, plan: bytes) -> str | None:
    """Return why the vendor does not take these bytes for a plan at all; ``None`` where it does, or cannot say.

    Everything else that it could say needs a GPU, and is said when the engine is loaded.
    """
    if not hasattr(trt.Runtime, "get_engine_validity"):
        return None
    runtime = trt.Runtime(logger(trt))
    size = int(runtime.engine_header_size)
    if len(plan) < size:
        return f"{PLAN} is shorter than the header of a plan"
    _, diagnostics = runtime.get_engine_validity(plan[:size])
    bit = int(getattr(trt.EngineInvalidityDiagnostics, _MALFORMED))
    return f"the vendor does not take {PLAN} for a plan" if int(diagnostics) & bit else None
