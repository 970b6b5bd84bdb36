# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TensorRtEngine` and `TensorRtRtxEngine`: probe, judge, load, compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.base import Compiled, Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.tensorrt.options import RTX, TENSORRT, TensorRtProduct, TensorRtSettings, runtime_keys

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.native_export.native_config import NativeExporter
    from xpuruntime.runtime.machine import EngineFacts, Machine


class TensorRtEngine(PackagedEngine["TensorRtSettings"]):
    """TensorRT 10 and 11 on ``cuda:N``. Building needs the GPU that the engine is for."""

    product: ClassVar[TensorRtProduct] = TENSORRT
    name: ClassVar[str] = TENSORRT.name
    aliases: ClassVar[tuple[str, ...]] = TENSORRT.names[1:]
    extra: ClassVar[str | None] = TENSORRT.extra
    title: ClassVar[str] = TENSORRT.title
    runs_on: ClassVar[str] = "cuda:N"
    absent: ClassVar[str] = f"{TENSORRT.title} is not installed"
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

    def refuse_device(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse what is no CUDA device, or is missing where it is needed: a request to compile may do without."""
        from xpuruntime.engines.tensorrt.refusals import refuse_missing

        refusal = super().refuse_device(request, machine)
        return refuse_missing(refusal, request, machine, self.product) if refusal is not None else None

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a GPU, an artifact, a model or open shapes; see `PackagedEngine.refuse`."""
        from xpuruntime.engines.tensorrt.refusals import refuse_artifact, refuse_chip, refuse_model, refuse_shapes

        return (
            refuse_chip(request, machine, self.product)
            or refuse_artifact(request, machine, self.product)
            or refuse_model(request, self.product)
            or refuse_shapes(request, self.product)
        )

    def resolve(self, request: Request, machine: Machine) -> Resolved[TensorRtSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        from xpuruntime.engines.tensorrt.controls import resolve_settings
        from xpuruntime.engines.tensorrt.refusals import capability_of

        facts = machine.engines[self.name]
        settings, controls = resolve_settings(request, self.product, facts, capability_of(request, machine))
        reason = f"{self.product.title} {facts.version}"
        if settings.targets:
            reason += f", built for compute capability {', '.join(settings.targets)}"
        if settings.tf32 and request.policy.execution.precision == "model":
            reason += "; fp32 products may use TF32: state precision fp32 to forbid it"
        return Resolved(settings, controls, reason)

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
    title: ClassVar[str] = RTX.title
    absent: ClassVar[str] = f"{RTX.title} is not installed"
    runtime_keys: ClassVar[tuple[str, ...]] = runtime_keys(RTX)
    library_files: ClassVar[tuple[str, ...]] = (
        "tensorrt_rtx/*.so*",
        "tensorrt_rtx_bindings/*.so*",
        "tensorrt_rtx_libs/*.so*",
    )
