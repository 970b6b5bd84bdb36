# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoEngine`: probe, judge, load, compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.base import Compiled, Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.openvino.options import GRAPH_OPTIONS, NAMES, OpenVinoSettings, options_of
from xpuruntime.engines.quantization.judge import refuse_int8
from xpuruntime.evidence.records import VerdictCode

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.control_builder import Option
    from xpuruntime.engines.native_export.native_config import NativeExporter
    from xpuruntime.runtime.machine import EngineFacts, Machine

_KINDS = ("cpu", "gpu", "npu")
#: Operator domains that OpenVINO's ONNX reader may have conversions for; it says of which operators when it loads.
_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "org.openvinotoolkit"})
#: Types of inputs and outputs that are handed over.
_ARRAYS = frozenset(
    {"float64", "float32", "float16", "bfloat16", "bool"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
#: Processor features with which the CPU plugin computes in fp16.
_FP16_CPU = frozenset({"avx512_fp16", "amx_fp16", "fphp", "asimdhp"})
#: Processor features of x86 with which it computes in bf16; by its own instructions, or by widening.
_BF16_CPU = frozenset({"avx512bw", "avx512_bf16", "amx_bf16"})


class OpenVinoEngine(PackagedEngine["OpenVinoSettings"]):
    """OpenVINO's native runtime on ``cpu``, ``gpu``, ``gpu:N`` and ``npu``."""

    name: ClassVar[str] = NAMES[0]
    aliases: ClassVar[tuple[str, ...]] = NAMES[1:]
    extra: ClassVar[str | None] = "openvino"
    title: ClassVar[str] = "OpenVINO"
    runs_on: ClassVar[str] = "cpu, gpu (Intel) and npu (Intel)"
    absent: ClassVar[str] = "the package openvino is not installed"
    device_kinds: ClassVar[tuple[str, ...] | None] = _KINDS
    compiles: ClassVar[bool] = True
    library_files: ClassVar[tuple[str, ...]] = ("openvino/_pyopenvino*.so", "openvino/libs/*.so*")

    def probe(self) -> EngineFacts:
        """Say what is installed, and which devices OpenVINO has."""
        from xpuruntime.engines.openvino.probing import probe

        return probe()

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the NPU, the GPUs, then the CPU."""
        facts = machine.engines.get(self.name)
        if facts is None or not facts.loadable:
            return ()
        from xpuruntime.engines.openvino.probing import our_device

        our_devices = [our_device(word) for word in facts.providers]
        our_devices = [device for device in our_devices if device.partition(":")[0] in _ORDER]
        return tuple(sorted(our_devices, key=lambda device: (_order(device), device)))

    def device_name(self, device: str, machine: Machine) -> str | None:
        """Return OpenVINO's full name of a GPU or NPU."""
        from xpuruntime.engines.openvino.probing import device_word

        return machine.engines[self.name].detail.get(device_word(device))

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the properties of the device's plugin, and how the graph is prepared."""
        kind = device.partition(":")[0]
        return {**options_of(kind), **GRAPH_OPTIONS} if kind in _KINDS else {}

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a missing device, and what OpenVINO does not compute; see `PackagedEngine.refuse`."""
        device = _refuse_device(request.device, machine.engines[self.name])
        return device or _refuse_model(request) or _refuse_precision(request, machine)

    def resolve(self, request: Request, machine: Machine) -> Resolved[OpenVinoSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        from xpuruntime.engines.openvino.controls import resolve_settings

        settings, controls = resolve_settings(request, machine)
        version = machine.engines[self.name].version
        reason = f"OpenVINO {version}, {settings.device}, INFERENCE_PRECISION_HINT={settings.hint}"
        wide = sorted({t.dtype for t in (*request.model.inputs, *request.model.outputs)} & _NARROWED.keys())
        if wide:
            reason += "; it computes " + " and ".join(f"{name} as {_NARROWED[name]}" for name in wide)
        return Resolved(settings, controls, reason)

    def load(self, request: Request, judgement: Judgement[OpenVinoSettings], machine: Machine) -> LoadedModel:
        """Compile the model, or import a compiled one; see `LoadedModel`."""
        from xpuruntime.engines.openvino.loading import load_model

        del machine
        return load_model(request, judgement.settings)

    def target(self, request: Request, judgement: Judgement[OpenVinoSettings], machine: Machine) -> dict[str, str]:
        """Return what a compiled model is tied to: version, device, and everything that it was compiled for."""
        facts = machine.engines[self.name]
        settings = judgement.settings
        tied = {"openvino": str(facts.version), "device": settings.device, "system": machine.system}
        if settings.device == "CPU":
            tied["processor"] = f"{machine.architecture}, {machine.cpu.name}"
            tied["processor_features"] = " ".join(sorted(machine.cpu.features))
        else:
            tied["processor"] = facts.detail.get(settings.device, request.device)
        tied["INFERENCE_PRECISION_HINT"] = settings.hint
        tied.update(sorted(settings.properties.items()))
        return tied

    def compile(
        self, request: Request, judgement: Judgement[OpenVinoSettings], machine: Machine, folder: Path
    ) -> Compiled:
        """Write the compiled model that OpenVINO exports."""
        from xpuruntime.engines.openvino.loading import compile_model

        del machine
        return compile_model(request, judgement.settings, folder)

    def exporter(self) -> type[NativeExporter]:
        """Return what writes configuration of OpenVINO and repositories of Triton."""
        from xpuruntime.engines.openvino.native_config import OpenVinoExporter

        return OpenVinoExporter


#: Types that OpenVINO takes and gives but does not compute in.
_NARROWED = {"int64": "int32", "uint64": "int32", "uint32": "int32", "float64": "float32"}


#: Kinds of devices in the order in which they are tried; of others that OpenVINO may have, nothing is known here.
_ORDER = ("npu", "gpu", "cpu")


def _order(device: str) -> int:
    return _ORDER.index(device.partition(":")[0])


def _refuse_device(device: str, facts: EngineFacts) -> Refusal | None:
    from xpuruntime.engines.openvino.probing import our_device

    kind, _, index = device.partition(":")
    have = [our_device(word) for word in facts.providers]
    if device in have or (not index and any(other.startswith(f"{kind}:") for other in have)):
        return None
    if index == "0" and kind in have:
        return None
    named = ", ".join(have) or "none"
    if any(other.partition(":")[0] == kind for other in have):
        return Refusal(VerdictCode.DEVICE_MISSING, f"{device} was not found: OpenVINO has {named}")
    why = facts.broken.get(kind.upper(), f"OpenVINO has no {kind.upper()} here")
    return Refusal(VerdictCode.DEVICE_MISSING, f"{device} was not found: {why}")


def _refuse_model(request: Request) -> Refusal | None:
    model = request.model
    for role, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            if role == "output" and tensor.kind == "unknown":  # the file gives it no type, and OpenVINO infers it
                continue
            if tensor.kind != "tensor" or tensor.dtype not in _ARRAYS:
                what = tensor.dtype if tensor.kind == "tensor" else f"{tensor.kind} of {tensor.dtype}"
                return Refusal(
                    VerdictCode.OP_UNSUPPORTED,
                    f"{role} {tensor.name!r} is of type {what}, which is not handed to OpenVINO",
                    f"put a Cast at this {role} into the model, for example to float32"
                    if tensor.kind == "tensor" and tensor.dtype != "string"
                    else "use the engine onnxruntime, or export the model with tensors of numbers",
                )
    foreign = {d: ops for d, ops in model.custom_domains.items() if d not in _DOMAINS}
    if foreign:
        named = "; ".join(f"{domain}: {', '.join(ops)}" for domain, ops in foreign.items())
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"OpenVINO has no conversion for the custom operators {named}",
            "export the model without them, or use another engine",
        )
    wide = [kind for kind in model.quantization.activations if kind in ("int16", "uint16")]
    if wide:
        return Refusal(
            VerdictCode.OP_UNSUPPORTED,
            f"the model quantizes activations to {' and '.join(wide)}, and OpenVINO computes such models wrongly "
            "without an error",
            "quantize activations to 8 bits, or use the engine onnxruntime or qnn",
        )
    return None


def _refuse_precision(request: Request, machine: Machine) -> Refusal | None:
    precision = request.policy.execution.precision
    if precision == "tf32":
        return Refusal(
            VerdictCode.PRECISION_UNSUPPORTED, "no plugin of OpenVINO computes in TF32", "use precision fp32"
        )
    cpu = request.device == "cpu"
    if precision == "fp16" and cpu and machine.cpu.features and not _FP16_CPU & set(machine.cpu.features):
        return Refusal(
            VerdictCode.PRECISION_UNSUPPORTED,
            "this processor has no fp16 arithmetic, and OpenVINO would silently compute in another precision",
            "use precision fp32, or the engine onnxruntime",
        )
    if precision == "bf16" and cpu and "avx2" in machine.cpu.features and not _BF16_CPU & set(machine.cpu.features):
        return Refusal(
            VerdictCode.PRECISION_UNSUPPORTED,
            "OpenVINO computes in bf16 on processors with AVX-512 or AMX, and this one has neither",
            "use precision fp32, or the engine onnxruntime",
        )
    return refuse_int8(request)
