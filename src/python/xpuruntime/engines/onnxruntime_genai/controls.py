# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of ONNX Runtime GenAI: session options, the policy's keys, and what neither policy nor folder may state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.base import EngineSettings, Refusal, Request
from xpuruntime.engines.control_builder import (
    BOOL,
    PROBED,
    REFERENCE,
    ControlBuilder,
    Option,
    check_options,
    own_options,
    show,
)
from xpuruntime.engines.model.file import GENERATION_CONFIG as CONFIG
from xpuruntime.engines.onnxruntime.options import AFFINITIES, DENORMALS, SESSION_OPTIONS
from xpuruntime.engines.onnxruntime.precision_controls import integer_nodes, resolve_weights
from xpuruntime.engines.precision.types import other_floats
from xpuruntime.evidence.records import Control, VerdictCode

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime_genai.folder import GenAiFolder

#: What a policy may call this engine.
NAMES = ("onnxruntime-genai", "genai")

#: The engine hands any text on to ONNX Runtime, which accepts names that it does not know.
OPTIONS: dict[str, Option] = {
    **{
        name: option
        for name, option in SESSION_OPTIONS.items()
        if name.startswith(("session.", "optimization.")) and name not in (AFFINITIES, DENORMALS)
    },
    "graph_optimization_level": SESSION_OPTIONS["graph_optimization_level"],
    "enable_cpu_mem_arena": Option(meaning="arena allocator", values=BOOL),
    "enable_mem_pattern": Option(meaning="plan memory once for each shape", values=BOOL),
}

_MOST_THREADS = 4096
#: Session options of a folder that are text and that the engine itself reads.
_OWN_TEXTS = ("log_id",)
#: Session options that a folder may not state, and why.
_NOT_IN_FOLDERS = {
    "custom_ops_library": "it loads code of the folder into the process",
    "enable_profiling": "it writes a file in each run; explain() profiles a copy",
    DENORMALS: "it holds for the whole thread that opens the model, and beyond the session",
}


class GenAiSettings(EngineSettings, frozen=True, kw_only=True):
    """What a model is opened with."""

    provider: str
    device_id: int = 0
    threads: int | None = None
    allow_cpu_ops: tuple[str, ...] = ()
    options: Mapping[str, str] = {}
    weights: Mapping[str, int] = {}
    search: Mapping[str, Any] = {}
    strict: bool = False


def folder_of(request: Request) -> GenAiFolder:
    """Return what was read of the folder of a request."""
    folder: GenAiFolder = request.model.source
    return folder


def refuse_options(folder: GenAiFolder) -> Refusal | None:
    """Refuse session options of the folder that the engine would accept without reading, or that reach beyond it."""
    for name, value in folder.session_options.items():
        reason = _NOT_IN_FOLDERS.get(name)
        if reason is None and isinstance(value, str) and name not in (*OPTIONS, *_OWN_TEXTS):
            reason = "no session option that is known here, and the engine accepts any name silently"
        if name.endswith("_num_threads") and not (type(value) is int and 0 <= value <= _MOST_THREADS):
            reason = f"{value!r:.40} is no number of threads from 0 to {_MOST_THREADS}"
        if reason is not None:
            fix = f"remove it from {Path(folder.folder) / CONFIG}"
            told = f"{CONFIG} states model.decoder.session_options.{name}: {reason}"
            return Refusal(VerdictCode.OPTION_INVALID, told, fix)
    return None


def refuse_precision(request: Request) -> Refusal | None:
    """Refuse a precision that is not that of the graph: nothing is converted."""
    precision, model = request.policy.execution.precision, request.model
    if precision == "model":
        return None
    again = "state precision: model, or build the folder again with another -p of onnxruntime_genai.models.builder"
    integers = integer_nodes(request)
    if precision == "int8":
        floats = sum(
            count for form, count in folder_of(request).weights.items() if not form.endswith("accuracy_level=4")
        )
        if integers and not floats and request.device == "cpu":
            return None
        reason = f"{floats} products of the graph compute in floats" if floats else "no product computes in int8"
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, f"{reason}, and nothing is converted", again)
    others = tuple(name for name in ("fp64", "fp32", "fp16", "bf16") if name != precision)
    if precision not in ("fp32", "fp16", "bf16") or (precision != "fp32" and request.device == "cpu"):
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, f"{precision} is not computed on {request.device}", again)
    if integers and request.device == "cpu":
        reason = f"these products compute in int8, whatever their weights are: {integers}"
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, reason, again)
    named = other_floats(msgspec.structs.replace(model, format="onnx"), others)
    if named:
        reason = f"the graph computes in other types, and nothing is converted: {named}"
        return Refusal(VerdictCode.PRECISION_UNSUPPORTED, reason, again)
    return None


def resolve(request: Request) -> tuple[GenAiSettings, tuple[Control, ...]]:
    """Resolve the policy of a request. Pure."""
    execution, folder = request.policy.execution, folder_of(request)
    cuda = request.device.startswith("cuda")
    where = f"execution.provider_options.{NAMES[0]}"
    options = check_options(own_options(execution.provider_options, NAMES), OPTIONS, where)
    settings = GenAiSettings(
        provider="CUDAExecutionProvider" if cuda else "CPUExecutionProvider",
        device_id=int(request.device.partition(":")[2] or 0),
        threads=execution.threads,
        allow_cpu_ops=tuple(execution.allow_cpu_ops) if cuda else (),
        options=options,
        weights=folder.weights,
        search=folder.search,
        strict=request.policy.mode == "strict",
    )
    builder = ControlBuilder(request.policy.stated())
    add = builder.add
    add("execution.engine", NAMES[0], "enforced", "the session runs on this engine and no other")
    placed = "all providers of the folder are cleared"
    if cuda and not execution.allow_cpu_ops:
        placed += ", nodes on the CPU are refused at load"
    add("execution.device", request.device, "enforced", f"{placed}, and the device is read back")
    add("execution.fallback", show(execution.fallback), "enforced", "the plan changes engine or device only as listed")
    add("execution.threads", f"intra_op_num_threads={execution.threads}", "enforced", "session option")
    weights = ", ".join(f"{count} x {form}" for form, count in folder.weights.items()) or "the graph's own types"
    add("execution.precision", weights, "enforced", "nothing is converted: another precision is refused")
    resolve_weights(request, builder, cuda=cuda)
    if cuda and execution.allow_cpu_ops:
        reason = "the engine does not say where nodes are, so that explain() alone finds others on the CPU"
        add("execution.allow_cpu_ops", show(execution.allow_cpu_ops), "advisory", reason)
    else:
        placed = "nodes on the CPU are refused at load" if cuda else "every node runs on the CPU here"
        add("execution.allow_cpu_ops", "-", "enforced", placed)
    if execution.memory.pool == "engine":
        add("execution.memory.pool", "ONNX Runtime's own arena", "enforced", "nothing is replaced")
    if execution.cuda_graph == "off":
        add("execution.cuda_graph", "off", "enforced", "no graph is captured")
    if execution.layout == "auto":
        add("execution.layout", "-", "enforced", "left to the engine")
    builder.shapes(request, "the engine takes any length up to the context")
    builder.determinism(request, "-", "advisory", "ONNX Runtime GenAI has no such setting")
    for key in builder.stated:
        if key.startswith("kernels."):
            reason = "ONNX Runtime GenAI opens a session of its own, into which no kernel can be put"
            add(
                key, "-", "unsupported", reason, "leave the key out, or run the decoder's graph with engine onnxruntime"
            )
        elif key == "accuracy.reference" and builder.stated[key] != REFERENCE:
            fix = f"state reference: {REFERENCE}"
            add(key, REFERENCE, "unsupported", f"the reference of this engine is {REFERENCE}", fix)
        elif key.startswith("accuracy."):
            add(key, PROBED, "enforced", "the session is refused beyond the tolerance")
    builder.options(where, NAMES, "checked against the known options and handed to ONNX Runtime")
    return settings, builder.finish("ONNX Runtime GenAI")
