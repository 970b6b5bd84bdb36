# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TorchEngine`: probe, judge, load."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import util
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved, WorkRecorder
from xpuruntime.engines.model.file import MODEL_CONFIG, generation_folder
from xpuruntime.engines.torch.names import NAMES, OPTIONS, TorchSettings
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from xpuruntime.engines.control_builder import Option
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.native_export.native_config import NativeExporter


class TorchEngine(PackagedEngine["TorchSettings"]):
    """PyTorch on ``cpu`` and ``cuda:N``: exported programs and modules."""

    name: ClassVar[str] = NAMES[0]
    aliases: ClassVar[tuple[str, ...]] = NAMES[1:]
    extra: ClassVar[str | None] = "torch"
    title: ClassVar[str] = "PyTorch"
    runs_on: ClassVar[str] = "cpu and cuda:N"
    absent: ClassVar[str] = "torch is not installed"
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu", "cuda")
    formats: ClassVar[tuple[str, ...]] = ("pt2", "torch", "transformers")
    library_files: ClassVar[tuple[str, ...]] = ("torch/lib/*.so*",)

    def probe(self) -> EngineFacts:
        """Look for the package; it is not imported, since that takes seconds."""
        version = installed("torch").get("torch")
        if version is None or util.find_spec("torch") is None:
            return self.not_installed()
        return EngineFacts(
            name=self.name, version=version, loadable=True, providers=("cpu",) if "+cpu" in version else ("cpu", "cuda")
        )

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CUDA devices where the wheel has CUDA, then the CPU."""
        facts = machine.engines.get(self.name)
        if facts is None or "cuda" not in facts.providers:
            return ("cpu",)
        return (*(f"cuda:{d.index}" for d in machine.cuda), "cpu")

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the options, which are the same on every device."""
        del device
        return OPTIONS

    def read(self, model: Any, example_inputs: Any, *, trust: bool) -> ModelInfo | None:
        """Return what is known of a module, of a ``.pt2`` file, or of a folder of transformers with a decoder."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(model, torch.nn.Module):
            from xpuruntime.engines.torch.program.reading import inspect_module

            return inspect_module(model, example_inputs)
        if example_inputs is None and isinstance(model, (str, os.PathLike)) and os.fspath(model).endswith(".pt2"):
            from xpuruntime.engines.torch.program.reading import inspect_program

            return inspect_program(os.fspath(model), trust=trust)
        folder = generation_folder(model, MODEL_CONFIG) if example_inputs is None else None
        if folder is None or generation_folder(model) is not None:
            return None
        from xpuruntime.engines.torch.decoder_folder import has_weights, inspect_decoder

        return inspect_decoder(folder) if has_weights(folder) else None

    def device_recorder(self, limit: int) -> WorkRecorder | None:
        """Return PyTorch's profiler while a PyTorch that can profile CUDA is loaded.

        CUPTI serves one user in a process, and that profiler stays blind for as long as the process lives when it finds
        CUPTI taken at its first start.
        """
        torch = sys.modules.get("torch")
        version = getattr(torch, "version", None)
        if getattr(version, "cuda", None) is None or not torch.cuda.is_available():  # type: ignore[union-attr]
            return None
        from xpuruntime.pytorch.profiling import kineto_recording

        return kineto_recording.KinetoRecording(limit)

    def resolve(self, request: Request, machine: Machine) -> Resolved[TorchSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        from xpuruntime.engines.torch.controls import resolve_settings

        settings, controls = resolve_settings(request)
        how = "compiled" if settings.mode == "compile" else "eager"
        return Resolved(settings, controls, f"PyTorch {machine.engines[self.name].version}, {how}")

    def load(self, request: Request, judgement: Judgement[TorchSettings], machine: Machine) -> LoadedModel:
        """Place the program on the device; see `LoadedModel`."""
        del machine
        if request.model.format == "transformers":
            from xpuruntime.engines.torch.decoder_model import load_decoder

            return load_decoder(request, judgement)  # type: ignore[arg-type]
        from xpuruntime.engines.torch.model import load_model

        return load_model(request, judgement)

    def exporter(self) -> type[NativeExporter]:
        """Return what writes scripts of PyTorch."""
        from xpuruntime.engines.torch.native_config import TorchExporter

        return TorchExporter

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse what is not installed, a precision, and a module on another device; see `PackagedEngine.refuse`."""
        kind, facts = request.device.partition(":")[0], machine.engines[self.name]
        if kind == "cuda" and "cuda" not in facts.providers:
            return Refusal(
                VerdictCode.LIBRARY_MISSING, f"torch {facts.version} has no CUDA in it", "install a CUDA build of torch"
            )
        decodes = request.model.format == "transformers"
        if decodes and not installed("transformers"):
            return Refusal(VerdictCode.LIBRARY_MISSING, "transformers is not installed", "pip install transformers")
        if decodes and request.policy.execution.weights.storage is not None and not installed("torchao"):
            reason = "torchao, which quantizes weights, is not installed"
            return Refusal(VerdictCode.LIBRARY_MISSING, reason, 'pip install "xpuruntime[torchao]"')
        precision = request.policy.execution.precision
        if precision == "int8":
            reason = "the torch engine does not quantize"
            return Refusal(
                VerdictCode.PRECISION_UNSUPPORTED,
                reason,
                "use precision fp16, or export to ONNX and name another engine",
            )
        if precision == "tf32" and kind == "cpu":
            return Refusal(VerdictCode.PRECISION_UNSUPPORTED, "the CPU has no TF32", "use precision fp32")
        where = getattr(request.model.source, "device", None)
        if where is not None and where != request.device:
            fix = f"move it first: module.to({request.device!r})"
            return Refusal(
                VerdictCode.DEVICE_UNSUPPORTED,
                f"the module is on {where}; a session does not move a module of yours",
                fix,
            )
        return None
