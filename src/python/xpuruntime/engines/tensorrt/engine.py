# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TensorRtEngine` and `TensorRtRtxEngine`: probe, judge, load, compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.base import Engine, Judgement, Refusal, Request
from xpuruntime.engines.tensorrt.options import RTX, TENSORRT, TensorRtProduct, runtime_keys
from xpuruntime.errors import PolicyError
from xpuruntime.evidence.records import Verdict, VerdictCode

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.base import Compiled, LoadedModel
    from xpuruntime.engines.native_export.native_config import NativeExporter
    from xpuruntime.engines.tensorrt.options import TensorRtSettings
    from xpuruntime.runtime.machine import EngineFacts, Machine

__all__ = ["TensorRtEngine", "TensorRtRtxEngine"]


class TensorRtEngine(Engine["TensorRtSettings"]):
    """TensorRT 10 and 11 on ``cuda:N``. Building needs the GPU that the engine is for."""

    product: ClassVar[TensorRtProduct] = TENSORRT
    name: ClassVar[str] = TENSORRT.name
    aliases: ClassVar[tuple[str, ...]] = TENSORRT.names[1:]
    extra: ClassVar[str | None] = TENSORRT.extra
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cuda",)
    compiles: ClassVar[bool] = True
    runtime_keys: ClassVar[tuple[str, ...]] = runtime_keys(TENSORRT)
    library_files: ClassVar[tuple[str, ...]] = (
        "tensorrt/*.so*",
        "tensorrt_bindings/*.so*",
        "tensorrt_libs/*.so*",
    )

    def probe(self) -> EngineFacts:
        """Import the bindings, if they are installed, and note what they offer; touches no device."""
        from xpuruntime.engines.tensorrt.options import probe

        return probe(self.product)

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CUDA devices; without one still ``cuda:0``, so that the plan says why it is not used."""
        facts = machine.engines.get(self.name)
        if facts is None or facts.version is None:
            return ()
        return tuple(f"cuda:{d.index}" for d in machine.cuda) or ("cuda:0",)

    def judge(self, request: Request, machine: Machine) -> Judgement[TensorRtSettings]:
        """Accept or reject from facts. A request with purpose ``"compile"`` is not rejected for want of a GPU."""
        from xpuruntime.engines.tensorrt.refusals import refuse_engine, refuse_kind

        facts = machine.engines.get(self.name)
        refusal = refuse_kind(request, machine, self.product) or refuse_engine(self.product, facts)
        if refusal is None and facts is not None:
            try:
                refusal = self._refusal(request, machine, facts)
                if refusal is None:
                    return self._accept(request, machine, facts)
            except PolicyError as error:
                refusal = Refusal(VerdictCode.OPTION_INVALID, error.reason, error.fix)
        refusal = refusal or Refusal(VerdictCode.ENGINE_MISSING, "it was not probed")
        return refusal.judgement(self.name, request.device)

    def _refusal(self, request: Request, machine: Machine, facts: EngineFacts) -> Refusal | None:
        from xpuruntime.engines.tensorrt.refusals import refuse_artifact, refuse_device, refuse_model, refuse_shapes

        device = refuse_device(request, machine, self.product, facts)
        if device is not None:
            return device
        if request.artifact is not None:
            foreign = refuse_artifact(request, machine, request.artifact, self.product)
            if foreign is not None:
                return foreign
        return refuse_model(request, self.product) or refuse_shapes(request, self.product)

    def _accept(self, request: Request, machine: Machine, facts: EngineFacts) -> Judgement[TensorRtSettings]:
        from xpuruntime.engines.tensorrt.controls import resolve_settings
        from xpuruntime.engines.tensorrt.refusals import capability_of

        settings, controls = resolve_settings(request, self.product, facts, capability_of(request, machine))
        reason = f"{self.product.title} {facts.version}"
        if settings.targets:
            reason += f", built for compute capability {', '.join(settings.targets)}"
        if settings.tf32 and request.policy.execution.precision == "model":
            reason += "; fp32 products may use TF32: state precision fp32 to forbid it"
        verdict = Verdict(
            candidate=f"{self.name}@{request.device}", accepted=True, code=VerdictCode.ACCEPTED, reason=reason
        )
        return Judgement(verdict=verdict, controls=controls, settings=settings)

    def load(self, request: Request, judgement: Judgement[TensorRtSettings], machine: Machine) -> LoadedModel:
        """Build the engine, or take the compiled one, and make it ready on the device; see `LoadedModel`."""
        from xpuruntime.engines.tensorrt.model import load_model
        from xpuruntime.engines.tensorrt.refusals import capability_of

        settings = judgement.settings
        chip = capability_of(request, machine) or "unknown"
        return load_model(request, settings, self.product, self.target(request, judgement, machine), chip)

    def exporter(self) -> type[NativeExporter] | None:
        """Return what writes command lines of trtexec, which is TensorRT's; ``None`` for TensorRT-RTX."""
        from xpuruntime.engines.tensorrt.native_config import TrtexecExporter

        return TrtexecExporter if self.product is TENSORRT else None

    def target(self, request: Request, judgement: Judgement[TensorRtSettings], machine: Machine) -> dict[str, str]:
        """Return product, version, compute capabilities, platform and precision; see `Engine.target`."""
        from xpuruntime.engines.tensorrt.refusals import describe_target

        settings = judgement.settings
        return describe_target(request, settings, machine, self.product)

    def compile(
        self, request: Request, judgement: Judgement[TensorRtSettings], machine: Machine, folder: Path
    ) -> Compiled:
        """Build the engine and write its plan and xpuruntime's record of it into `folder`."""
        from xpuruntime.engines.tensorrt.refusals import write_artifact

        settings = judgement.settings
        return write_artifact(request, settings, self.product, self.target(request, judgement, machine), folder)


class TensorRtRtxEngine(TensorRtEngine):
    """TensorRT-RTX on ``cuda:N``. Building needs no GPU; kernels are compiled on the GPU when the engine is loaded."""

    product: ClassVar[TensorRtProduct] = RTX
    name: ClassVar[str] = RTX.name
    aliases: ClassVar[tuple[str, ...]] = RTX.names[1:]
    extra: ClassVar[str | None] = RTX.extra
    runtime_keys: ClassVar[tuple[str, ...]] = runtime_keys(RTX)
    library_files: ClassVar[tuple[str, ...]] = (
        "tensorrt_rtx/*.so*",
        "tensorrt_rtx_bindings/*.so*",
        "tensorrt_rtx_libs/*.so*",
    )
