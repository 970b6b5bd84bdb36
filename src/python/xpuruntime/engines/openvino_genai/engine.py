# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoGenAiEngine`: read, probe, judge, load."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import PackagedEngine, Refusal, Resolved
from xpuruntime.engines.model.file import MODEL_CONFIG, generation_folder
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.files.paths import kind_of
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.engines.control_builder import Option
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.openvino_genai.controls import PipelineSettings
    from xpuruntime.runtime.machine import Machine

__all__ = ["OpenVinoGenAiEngine"]

_PACKAGE, _DISTRIBUTION = "openvino_genai", "openvino-genai"
_GRAPH = "openvino_model.xml"


class OpenVinoGenAiEngine(PackagedEngine["PipelineSettings"]):
    """OpenVINO GenAI on ``cpu``."""

    name: ClassVar[str] = "openvino-genai"
    extra: ClassVar[str | None] = "openvino-genai"
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu",)
    title: ClassVar[str] = "OpenVINO GenAI"
    runs_on: ClassVar[str] = "cpu here"
    absent: ClassVar[str] = "openvino-genai is not installed"
    formats: ClassVar[tuple[str, ...]] = ("openvino-genai",)
    library_files: ClassVar[tuple[str, ...]] = (f"{_PACKAGE}/*.so*", "openvino/libs/*.so*")

    def probe(self) -> EngineFacts:
        """Say what is installed; nothing is imported."""
        found = installed(_DISTRIBUTION, "openvino")
        version = found.get(_DISTRIBUTION)
        if version is None or util.find_spec(_PACKAGE) is None:
            return self.not_installed()
        return EngineFacts(
            name=self.name, version=version, loadable=True, detail={"openvino": found.get("openvino", "missing")}
        )

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CPU."""
        del machine
        return ("cpu",)

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the properties that a policy may state."""
        from xpuruntime.engines.openvino_genai.controls import OPTIONS

        return OPTIONS if device == "cpu" else {}

    def read(self, model: Any, example_inputs: Any, *, trust: bool) -> ModelInfo | None:
        """Return what is known of a folder with ``openvino_model.xml`` and ``config.json``."""
        del trust
        folder = generation_folder(model, MODEL_CONFIG) if example_inputs is None else None
        if folder is None or kind_of(folder / _GRAPH) == "missing" or generation_folder(model) is not None:
            return None
        from xpuruntime.engines.openvino_genai.folder import inspect_pipeline

        return inspect_pipeline(folder)

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a precision; see `PackagedEngine.refuse`."""
        from xpuruntime.engines.openvino_genai.controls import PRECISIONS

        del machine
        if request.policy.execution.precision in PRECISIONS:
            return None
        reason = f"{request.policy.execution.precision} is not computed here, and nothing is converted"
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, reason, "use precision fp32, or bf16")

    def resolve(self, request: Request, machine: Machine) -> Resolved[PipelineSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        from xpuruntime.engines.openvino_genai.controls import resolve

        facts = machine.engines[self.name]
        reason = f"OpenVINO GenAI {facts.version} on OpenVINO {facts.detail['openvino']}"
        return Resolved(*resolve(request), reason)

    def load(self, request: Request, judgement: Judgement[PipelineSettings], machine: Machine) -> LoadedModel:
        """Open the folder; see `LoadedModel`."""
        from xpuruntime.engines.openvino_genai.model import load_pipeline

        del machine
        return load_pipeline(request, judgement)
