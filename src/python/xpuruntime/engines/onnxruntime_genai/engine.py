# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OnnxRuntimeGenAiEngine`: probe, judge, load."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.model.file import generation_folder
from xpuruntime.engines.onnxruntime.engine import WHEELS
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.runtime.machine import EngineFacts, Machine

if TYPE_CHECKING:
    from xpuruntime.engines.control_builder import Option
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.onnxruntime_genai.controls import GenAiSettings

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

_PACKAGE = "onnxruntime_genai"
_DISTRIBUTIONS = ("onnxruntime-genai", "onnxruntime-genai-cuda")
_INSTALL = (
    "`pip install --no-deps onnxruntime-genai` (xpuruntime[genai] brings onnxruntime along, which is installed over "
    "onnxruntime-gpu)"
)


class OnnxRuntimeGenAiEngine(PackagedEngine["GenAiSettings"]):
    """ONNX Runtime GenAI on ``cpu`` and ``cuda:N``."""

    name: ClassVar[str] = "onnxruntime-genai"
    aliases: ClassVar[tuple[str, ...]] = ("genai",)
    extra: ClassVar[str | None] = "genai"
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu", "cuda")
    title: ClassVar[str] = "ONNX Runtime GenAI"
    runs_on: ClassVar[str] = "cpu and cuda:N"
    absent: ClassVar[str] = "no onnxruntime-genai wheel is installed"
    install: ClassVar[str | None] = _INSTALL
    formats: ClassVar[tuple[str, ...]] = ("genai",)
    library_files: ClassVar[tuple[str, ...]] = (f"{_PACKAGE}/*.so*", "onnxruntime/capi/*.so*")

    def probe(self) -> EngineFacts:
        """Say what is installed; nothing is imported."""
        from importlib import metadata

        def first(names: tuple[str, ...]) -> tuple[str, str] | None:
            for name in names:
                try:
                    return name, metadata.version(name)
                except metadata.PackageNotFoundError:
                    continue
            return None

        wheel, runtime = first(_DISTRIBUTIONS), first(WHEELS)
        if wheel is None:
            return self.not_installed()
        try:
            spec = importlib.util.find_spec(_PACKAGE)
        except ValueError:  # it is in sys.modules, and is no module
            spec = None
        if spec is None or not spec.submodule_search_locations:
            fix = f"pip install --force-reinstall --no-deps {wheel[0]}"
            return EngineFacts(name=self.name, version=wheel[1], reason="its package cannot be found", fix=fix)
        if runtime is None:
            return EngineFacts(
                name=self.name,
                version=wheel[1],
                reason="no onnxruntime wheel is installed",
                fix="pip install onnxruntime",
            )
        if (needs := _unmet(wheel[0], runtime[1])) is not None:
            reason = f"{' '.join(wheel)} requires onnxruntime{needs}, and {' '.join(runtime)} is installed"
            fix = f'pip install --upgrade "{runtime[0]}{needs}"'
            return EngineFacts(name=self.name, version=wheel[1], reason=reason, fix=fix)
        folder = Path(next(iter(spec.submodule_search_locations)))
        has_cuda = any(folder.glob("*onnxruntime-genai-cuda*"))
        return EngineFacts(
            name=self.name,
            version=wheel[1],
            loadable=True,
            providers=(_CUDA, _CPU) if has_cuda else (_CPU,),
            detail={"wheel": " ".join(wheel), "onnxruntime": " ".join(runtime)},
        )

    def read(self, model: Any, example_inputs: Any, *, trust: bool) -> ModelInfo | None:
        """Describe a folder with ``genai_config.json``."""
        del trust
        folder = generation_folder(model)
        if folder is None or example_inputs is not None:
            return None
        from xpuruntime.engines.onnxruntime_genai.folder import inspect_folder

        return inspect_folder(folder)

    def as_onnx(self, model: ModelInfo) -> tuple[ModelInfo, Callable[[LoadedModel], LoadedModel]]:
        """Return the decoder's graph, which runs without a past."""
        from xpuruntime.engines.onnxruntime_genai.folder import decoder_of

        return decoder_of(model)

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CUDA devices where the wheel has CUDA, then the CPU."""
        facts = machine.engines.get(self.name)
        if facts is None or _CUDA not in facts.providers:
            return ("cpu",)
        return (*(f"cuda:{device.index}" for device in machine.cuda), "cpu")

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the session options; see `xpuruntime.engines.onnxruntime_genai.controls`."""
        from xpuruntime.engines.onnxruntime_genai.controls import OPTIONS

        return OPTIONS if device.partition(":")[0] in ("cpu", "cuda") else {}

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a wheel without CUDA, options of the folder, and a precision; see `PackagedEngine.refuse`."""
        from xpuruntime.engines.onnxruntime_genai.controls import folder_of, refuse_options, refuse_precision

        facts = machine.engines[self.name]
        if request.device.startswith("cuda") and _CUDA not in facts.providers:
            wheel = facts.detail.get("wheel", "installed")
            fix = "pip uninstall -y onnxruntime-genai && pip install --no-deps onnxruntime-genai-cuda"
            return Refusal(VerdictCode.LIBRARY_MISSING, f"the wheel {wheel} has no CUDA", fix)
        return refuse_options(folder_of(request)) or refuse_precision(request)

    def resolve(self, request: Request, machine: Machine) -> Resolved[GenAiSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        from xpuruntime.engines.onnxruntime_genai.controls import folder_of, resolve

        settings, controls = resolve(request)
        facts = machine.engines[self.name]
        reason = f"ONNX Runtime GenAI {facts.version} on {facts.detail.get('onnxruntime', 'onnxruntime')}"
        reason += f", {settings.provider}"
        named = sorted(str(name) for provider in folder_of(request).providers for name in provider)
        if named:
            reason += f"; the folder names the providers {', '.join(named)}, and the policy's device decides"
        return Resolved(settings, controls, reason)

    def load(self, request: Request, judgement: Judgement[GenAiSettings], machine: Machine) -> LoadedModel:
        """Open the folder; see `LoadedModel`."""
        from xpuruntime.engines.onnxruntime_genai.model import load_folder

        del machine
        return load_folder(request, judgement.settings)


def _unmet(wheel: str, version: str) -> str | None:
    """Return which ONNX Runtime a wheel requires, where this is another: --no-deps has pip compare nothing."""
    from importlib import metadata

    from packaging.requirements import Requirement

    for stated in map(Requirement, metadata.requires(wheel) or ()):
        if stated.name.startswith("onnxruntime") and not stated.specifier.contains(version, prereleases=True):
            return str(stated.specifier)
    return None
