# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoGenAiEngine`: probe, judge, load; the properties of a pipeline and what becomes of the policy's keys."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import util
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.base import EngineSettings, Judgement, LoadedModel, PackagedEngine, Refusal, Request, Resolved
from xpuruntime.engines.control_builder import ControlBuilder, Option, check_options, own_options
from xpuruntime.engines.model.file import MODEL_CONFIG, generation_folder
from xpuruntime.evidence.records import Control, VerdictCode
from xpuruntime.files.paths import kind_of
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

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
        versions = installed(_DISTRIBUTION, "openvino")
        version = versions.get(_DISTRIBUTION)
        if version is None or util.find_spec(_PACKAGE) is None:
            return self.not_installed()
        return EngineFacts(
            name=self.name, version=version, loadable=True, detail={"openvino": versions.get("openvino", "missing")}
        )

    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the CPU."""
        del machine
        return ("cpu",)

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the properties that a policy may state."""
        return OPTIONS if device == "cpu" else {}

    def read(self, model: Any, example_inputs: Any, *, trust: bool) -> ModelInfo | None:
        """Describe a folder with ``openvino_model.xml`` and ``config.json``."""
        del trust
        folder = generation_folder(model, MODEL_CONFIG) if example_inputs is None else None
        if folder is None or kind_of(folder / _GRAPH) == "missing" or generation_folder(model) is not None:
            return None
        from xpuruntime.engines.openvino_genai.model import inspect_pipeline

        return inspect_pipeline(folder)

    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a precision; see `PackagedEngine.refuse`."""
        del machine
        if request.policy.execution.precision in PRECISIONS:
            return None
        reason = f"{request.policy.execution.precision} is not computed here, and nothing is converted"
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, reason, "use precision fp32, or bf16")

    def resolve(self, request: Request, machine: Machine) -> Resolved[PipelineSettings]:
        """Return the settings; see `PackagedEngine.resolve`."""
        facts = machine.engines[self.name]
        reason = f"OpenVINO GenAI {facts.version} on OpenVINO {facts.detail['openvino']}"
        return Resolved(*resolve(request), reason)

    def load(self, request: Request, judgement: Judgement[PipelineSettings], machine: Machine) -> LoadedModel:
        """Open the folder; see `LoadedModel`."""
        from xpuruntime.engines.openvino_genai.model import load_pipeline

        del machine
        return load_pipeline(request, judgement)


NAME = "openvino-genai"
PRECISIONS = {"model": "f32", "fp32": "f32", "bf16": "bf16"}
#: The CPU rounds the cache, and activations before compressed weights, by default.
_DEFAULTS = {"ATTENTION_BACKEND": "PA", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
OPTIONS: dict[str, Option] = {
    "ATTENTION_BACKEND": Option(meaning="paged attention, or attention over a state", values=("PA", "SDPA")),
    "KV_CACHE_PRECISION": Option(meaning="type of keys and values", values=("f32", "bf16", "f16", "u8")),
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": Option(
        meaning="values that share a scale where activations are rounded; 0: they are not", high=65536
    ),
}


class PipelineSettings(EngineSettings, frozen=True, kw_only=True):
    """What a pipeline is opened with."""

    properties: Mapping[str, str]
    strict: bool = False


def resolve(request: Request) -> tuple[PipelineSettings, tuple[Control, ...]]:
    """Resolve the policy of a request. Pure."""
    execution = request.policy.execution
    where = f"execution.provider_options.{NAME}"
    properties = {**_DEFAULTS, **check_options(own_options(execution.provider_options, (NAME,)), OPTIONS, where)}
    properties["INFERENCE_PRECISION_HINT"] = hint = PRECISIONS[execution.precision]
    builder = ControlBuilder(request.policy.stated())
    builder.common(request, NAME, checked="the pipeline is opened on CPU, which has no fallback")
    builder.shapes(request, "any length up to the context runs")
    builder.add(
        "execution.precision", f"INFERENCE_PRECISION_HINT={hint}", "advisory", "no pipeline says what it ran in"
    )
    if execution.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = str(execution.threads)
        reason = "a property of the pipeline, which cannot be read back"
        builder.add("execution.threads", str(execution.threads), "advisory", reason)
    if execution.cuda_graph == "off":
        builder.add("execution.cuda_graph", "off", "enforced", "the CPU has none")
    builder.determinism(request, "-", "advisory", "OpenVINO GenAI has no such setting")
    builder.options(where, (NAME,), "checked, and handed to the pipeline, which refuses what it does not know")
    settings = PipelineSettings(properties=properties, strict=request.policy.mode == "strict")
    return settings, builder.finish("OpenVINO GenAI")
