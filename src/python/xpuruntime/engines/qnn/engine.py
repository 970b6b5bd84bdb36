# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`QnnEngine`: probe, judge, load, compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.base import Compiled, Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.qnn.options import NAMES, QnnSettings, Target
from xpuruntime.evidence.records import VerdictCode

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.runtime.machine import EngineFacts, Machine

_NO_ARRAYS = ("float8e", "float6e", "float4e", "int4", "uint4", "int2", "uint2", "complex", "string", "bfloat16")


class QnnEngine(PackagedEngine["QnnSettings"]):
    """QNN's HTP backend as ``npu``: a Qualcomm device, or the simulator of x86-64."""

    name: ClassVar[str] = NAMES[0]
    extra: ClassVar[str | None] = "qnn"
    title: ClassVar[str] = "QNN"
    runs_on: ClassVar[str] = (
        "npu, its HTP backend. The backends for the CPU and the GPU are not driven, and the wheel for x86-64 has no "
        "QnnCpu"
    )
    device_kinds: ClassVar[tuple[str, ...] | None] = ("npu",)
    compiles: ClassVar[bool] = True
    library_files: ClassVar[tuple[str, ...]] = ("onnxruntime_qnn/*.so*", "onnxruntime/capi/*.so*")

    def probe(self) -> EngineFacts:
        """Look for the wheel and its libraries; loads none of them."""
        from xpuruntime.engines.qnn.opening import probe

        return probe(self.name)

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return ``npu`` where the wheel is there."""
        facts = machine.engines.get(self.name)
        return ("npu",) if facts is not None and facts.version is not None else ()

    def device_name(self, device: str, machine: Machine) -> str | None:
        """Return ``"device"`` or ``"simulator"``; the chip is a setting."""
        del device
        return machine.engines[self.name].detail.get("runs_on")

    def not_installed(self) -> EngineFacts:
        """Return what the probe says without the wheel."""
        from xpuruntime.engines.qnn.opening import missing

        return missing(self.name)

    def refuse_device(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse all but ``npu``, which takes no index; see `PackagedEngine.refuse_device`."""
        return None if request.device == "npu" else super().refuse_device(request, machine)

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse where no chip is named, or it does not compute the model; see `PackagedEngine.refuse`."""
        from xpuruntime.engines.qnn.controls import chip_options
        from xpuruntime.engines.qnn.options import resolve_target, state_one

        del machine
        target = resolve_target(chip_options(request))
        if target is None:
            reason = "a QNN graph is compiled for one chip, and the policy names none"
            return Refusal(VerdictCode.TARGET_MISSING, reason, state_one())
        return _refuse_model(request, target)

    def resolve(self, request: Request, machine: Machine) -> Resolved[QnnSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        from xpuruntime.engines.qnn.controls import chip_options, resolve_settings
        from xpuruntime.engines.qnn.options import resolve_target

        facts, target = machine.engines[self.name], resolve_target(chip_options(request))
        assert target is not None, "`refuse` has seen to it"
        settings, controls = resolve_settings(request, target, simulated=facts.simulated)
        where = "the HTP simulator" if settings.simulated else "the device"
        reason = f"onnxruntime-qnn {facts.version}, QNN {facts.detail.get('sdk', '?')}, {where} as {target}"
        if request.policy.execution.precision == "model" and request.model.quantization.scheme == "none":
            reason += "; HTP computes fp32 tensors in fp16 inside: state precision fp16 to say so"
        return Resolved(settings, controls, reason, settings.uncompilable)

    def load(self, request: Request, judgement: Judgement[QnnSettings], machine: Machine) -> LoadedModel:
        """Open the session, here or in a process of its own; see `LoadedModel`."""
        from xpuruntime.engines.qnn.loading import load_model

        del machine
        return load_model(request, judgement.settings)

    def target(self, request: Request, judgement: Judgement[QnnSettings], machine: Machine) -> dict[str, str]:
        """Return the provider, the SDK and the chip: QNN itself checks none of them when it loads a context."""
        del request
        settings = judgement.settings
        facts = machine.engines[self.name]
        return {
            "onnxruntime-qnn": facts.version or "?",
            "qnn_sdk": facts.detail.get("sdk", "?"),
            "soc_model": str(settings.target.soc_model),
            "htp_arch": str(settings.target.htp_arch),
        }

    def compile(self, request: Request, judgement: Judgement[QnnSettings], machine: Machine, folder: Path) -> Compiled:
        """Write an ONNX file with a context binary for the chip; needs no device."""
        from xpuruntime.engines.qnn.loading import compile_model

        del machine
        return compile_model(request, judgement.settings, folder)


def _refuse_model(request: Request, target: Target) -> Refusal | None:
    from xpuruntime.engines.model import open_dimensions
    from xpuruntime.engines.qnn.controls import BF16_SOC
    from xpuruntime.engines.quantization.judge import refuse_int8

    precision = request.policy.execution.precision
    if precision == "tf32":
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, "an NPU has no TF32", "use precision fp16")
    if precision == "bf16" and target.soc_model < BF16_SOC:
        return Refusal(
            VerdictCode.PRECISION_UNSUPPORTED,
            f"{target} has no bf16: QNN computes it from soc_model {BF16_SOC} on",
            "use precision fp16, or a chip such as soc: sc8480xp",
        )
    refused = refuse_int8(request)
    if refused is not None:
        return refused
    left = open_dimensions(request.model)
    if left:
        shapes = ", ".join(f"{name}: {shape}" for name, shape in left.items())
        return Refusal(
            VerdictCode.SHAPES_OPEN,
            f"QNN compiles a graph for fixed sizes, and the inputs {', '.join(left)} leave dimensions open",
            f"state execution.shapes: {{{shapes}}} with a size for each",
        )
    for role, tensors in (("input", request.model.inputs), ("output", request.model.outputs)):
        for tensor in tensors:
            if tensor.kind != "tensor" or tensor.dtype.startswith(_NO_ARRAYS):
                return Refusal(
                    VerdictCode.OP_UNSUPPORTED,
                    f"{role} {tensor.name!r} is a {tensor.kind} of {tensor.dtype}, which QNN does not take",
                    f"put a Cast at this {role} into the model, for example to float32",
                )
            if 0 in (tensor.shape or ()):  # QNN divides by it, which ends the process
                return Refusal(
                    VerdictCode.SHAPE_UNSUPPORTED,
                    f"{role} {tensor.name!r} has no elements ({list(tensor.shape or ())}), and QNN takes none such",
                    "state execution.shapes with sizes of at least 1, or use the engine onnxruntime",
                )
    return None
