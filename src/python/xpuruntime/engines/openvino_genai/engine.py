# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoGenAiEngine`: read, probe, judge, load."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import Engine, Judgement, Refusal
from xpuruntime.engines.model.file import MODEL_CONFIG, generation_folder
from xpuruntime.errors import PolicyError
from xpuruntime.evidence.records import Verdict, VerdictCode
from xpuruntime.files.paths import kind_of
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import install_command, installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.base import LoadedModel, Request
    from xpuruntime.engines.control_builder import Option
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.openvino_genai.controls import PipelineSettings
    from xpuruntime.runtime.machine import Machine

__all__ = ["OpenVinoGenAiEngine"]

_PACKAGE, _DISTRIBUTION = "openvino_genai", "openvino-genai"
_GRAPH = "openvino_model.xml"
_ABSENT = "openvino-genai is not installed"


class OpenVinoGenAiEngine(Engine["PipelineSettings"]):
    """OpenVINO GenAI on ``cpu``."""

    name: ClassVar[str] = "openvino-genai"
    extra: ClassVar[str | None] = "openvino-genai"
    device_kinds: ClassVar[tuple[str, ...] | None] = ("cpu",)
    formats: ClassVar[tuple[str, ...]] = ("openvino-genai",)
    library_files: ClassVar[tuple[str, ...]] = (f"{_PACKAGE}/*.so*", "openvino/libs/*.so*")

    def probe(self) -> EngineFacts:
        """Say what is installed; nothing is imported."""
        found = installed(_DISTRIBUTION, "openvino")
        version = found.get(_DISTRIBUTION)
        if version is None or util.find_spec(_PACKAGE) is None:
            return EngineFacts(name=self.name, reason=_ABSENT, fix=install_command(_DISTRIBUTION))
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

    def judge(self, request: Request, machine: Machine) -> Judgement[PipelineSettings]:
        """Accept or reject from facts."""
        from xpuruntime.engines.openvino_genai.controls import resolve

        refusal = self._refuse(request, machine)
        if refusal is not None:
            return refusal.judgement(self.name, request.device)
        try:
            settings, controls = resolve(request)
        except PolicyError as error:
            return Refusal(VerdictCode.OPTION_INVALID, error.reason, error.fix).judgement(self.name, request.device)
        facts = machine.engines[self.name]
        reason = f"OpenVINO GenAI {facts.version} on OpenVINO {facts.detail['openvino']}"
        candidate = f"{self.name}@{request.device}"
        verdict = Verdict(candidate=candidate, accepted=True, code=VerdictCode.ACCEPTED, reason=reason)
        return Judgement(verdict=verdict, controls=controls, settings=settings)

    def load(self, request: Request, judgement: Judgement[PipelineSettings], machine: Machine) -> LoadedModel:
        """Open the folder; see `LoadedModel`."""
        from xpuruntime.engines.openvino_genai.model import load_pipeline

        del machine
        return load_pipeline(request, judgement)

    def _refuse(self, request: Request, machine: Machine) -> Refusal | None:
        if request.device != "cpu":
            reason = f"the engine runs on cpu here, not on {request.device!r}"
            return Refusal(VerdictCode.DEVICE_UNSUPPORTED, reason, "state device: cpu")
        facts = machine.engines.get(self.name)
        if facts is None or facts.version is None:
            return Refusal(VerdictCode.ENGINE_MISSING, _ABSENT, install_command(_DISTRIBUTION))
        from xpuruntime.engines.openvino_genai.controls import PRECISIONS

        if request.policy.execution.precision not in PRECISIONS:
            reason = f"{request.policy.execution.precision} is not computed here, and nothing is converted"
            return Refusal(VerdictCode.PRECISION_UNSUPPORTED, reason, "use precision fp32, or bf16")
        return None
