# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of OpenVINO GenAI: properties of a pipeline, and what becomes of the policy's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xpuruntime.engines.base import EngineSettings
from xpuruntime.engines.control_builder import ControlBuilder, Option, check_options, own_options

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

__all__ = ["NAME", "OPTIONS", "PRECISIONS", "PipelineSettings", "resolve"]

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
    """What a pipeline is opened with.

    Attributes
    ----------
    properties : mapping of str to str
        Of OpenVINO and of the pipeline.
    strict : bool
    """

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
