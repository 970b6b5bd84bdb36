# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of OpenVINO for the keys of a policy, on its CPU, GPU and NPU plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.control_builder import (
    BOOL,
    ENGINE_CHOICE,
    ControlBuilder,
    check_options,
    fp32_nodes,
    own_options,
)
from xpuruntime.engines.openvino.options import GRAPH_OPTIONS, NAMES, OpenVinoSettings, options_of
from xpuruntime.engines.openvino.probing import device_word
from xpuruntime.engines.precision.types import other_floats
from xpuruntime.engines.quantization.judge import quantizes
from xpuruntime.evidence.records import Control

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.runtime.machine import Machine

_WHERE = "execution.provider_options.openvino"
_INT8_FIX = "state engine: onnxruntime, which enforces int8, or accept that with mode: auto"
_HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32"}


def resolve_settings(request: Request, machine: Machine) -> tuple[OpenVinoSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for OpenVINO on its device. Pure."""
    kind = request.device.partition(":")[0]
    policy = request.policy
    settings = OpenVinoSettings(
        device=device_word(request.device),
        hint=_hint(policy.execution.precision, request.model),
        precision=policy.execution.precision,
        strict=policy.mode == "strict",
    )
    builder = ControlBuilder(policy.stated())
    builder.common(request, "openvino", checked="read back from the compiled model (EXECUTION_DEVICES)")
    settings = _given_options(request, settings, builder, kind)
    settings = _precision(request, settings, builder)
    settings = _threads(request, settings, builder, machine, kind)
    settings = _ranges(request, settings, builder)
    _rest(request, builder, kind)
    settings = _kernels(request, settings, builder)
    return settings, builder.finish("OpenVINO")


def _hint(precision: str, model: ModelInfo) -> str:
    """Return the precision hint. A model whose floats are all fp32 is computed in it; others as their types say."""
    if precision != "model":
        return _HINTS[precision]
    types = {tensor.dtype for tensor in (*model.inputs, *model.outputs)} | set(model.weights)
    return "dynamic" if types & {"float16", "bfloat16", "float64"} else "f32"


def _given_options(
    request: Request, settings: OpenVinoSettings, builder: ControlBuilder, kind: str
) -> OpenVinoSettings:
    options = own_options(request.policy.execution.provider_options, NAMES)
    table = options_of(kind)
    checked = check_options(options, {**table, **GRAPH_OPTIONS}, _WHERE)
    if checked.pop("quantizer", "onnxruntime") == "nncf":
        settings = settings.replace(style="openvino-nncf")
    properties = {
        name: ("NO", "YES")[int(value)] if table[name].values == BOOL else value for name, value in checked.items()
    }
    properties.setdefault("PERFORMANCE_HINT", "LATENCY")
    if kind == "cpu":
        # By default, activations are quantized to 8 bits where weights are compressed, and cached keys and values too.
        properties.setdefault("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0")
        if settings.hint == "f32":
            properties.setdefault("KV_CACHE_PRECISION", "f32")
    handed = "validated, handed to the plugin and read back after compiling; quantizer chooses what prepares the graph"
    builder.options(_WHERE, NAMES, handed)
    return settings.replace(properties=properties)


def _precision(request: Request, settings: OpenVinoSettings, builder: ControlBuilder) -> OpenVinoSettings:
    execution = request.policy.execution
    hint = f"INFERENCE_PRECISION_HINT={settings.hint}"
    if execution.precision == "int8":
        settings = settings.replace(quantize=quantizes(request))
        builder.add(
            "execution.precision",
            f"{'quantized with the inputs given' if settings.quantize else 'the model is quantized'}, {hint}",
            "advisory",
            "the plugin may compute a quantized operation in fp32 where it has no 8-bit kernel for it; the evidence "
            "says which",
            _INT8_FIX if request.device == "cpu" else None,
        )
    elif execution.precision == "model" and (named := _wide_floats(request)):
        builder.controls.append(  # although no policy states it
            Control(
                key="execution.precision",
                requested="model",
                resolved=hint,
                enforceability="unsupported",
                reason=f"OpenVINO computes fp64 in fp32: {named}",
                fix="take another engine (execution: {engine: onnxruntime, device: cpu}), or state precision fp32",
            )
        )
    elif execution.precision == "model":
        builder.add("execution.precision", hint, "enforced", "nothing is converted; read back after compiling")
    elif execution.precision == "fp32":
        reason = "refused where the compiled model reads back another hint"
        if request.model.quantization.activations:
            reason += (
                ". The plugin may compute what stands between QuantizeLinear and DequantizeLinear in integers; the "
                "evidence names those nodes"
            )
        builder.add("execution.precision", hint, "enforced", reason)
    else:
        reason = (
            "refused where the compiled model reads back another hint; under it, the plugin leaves operations in fp32 "
            "where it sees fit, and the evidence says which"
        )
        builder.add("execution.precision", hint, "advisory", reason, "state precision fp32")
    if execution.tf32 is False:
        builder.add("execution.tf32", "-", "enforced", "no plugin of OpenVINO computes in TF32")
    else:
        builder.add("execution.tf32", "-", "unsupported", "no plugin of OpenVINO computes in TF32")
    return settings


def _wide_floats(request: Request) -> str:
    """Return the nodes in fp64, in a line; an artifact was judged when it was compiled, and its model may be gone."""
    return "" if request.artifact is not None else other_floats(request.model, ("fp64",), casts=True)


def _threads(
    request: Request, settings: OpenVinoSettings, builder: ControlBuilder, machine: Machine, kind: str
) -> OpenVinoSettings:
    threads = request.policy.execution.threads
    key = "execution.threads"
    if threads is None:
        return settings
    if kind != "cpu":
        builder.add(key, "-", "unsupported", f"the {kind.upper()} plugin has no threads to set")
        return settings
    if threads > machine.cpu.cores:
        reason = f"OpenVINO takes no more threads than there are cores, which is {machine.cpu.cores}"
        resolved = f"INFERENCE_NUM_THREADS={machine.cpu.cores}"
        builder.add(key, resolved, "unsupported", reason, f"state at most {machine.cpu.cores}")
        return settings.with_properties({"INFERENCE_NUM_THREADS": str(machine.cpu.cores)})
    builder.add(key, f"INFERENCE_NUM_THREADS={threads}", "enforced", "read back after compiling")
    return settings.with_properties({"INFERENCE_NUM_THREADS": str(threads)})


def _ranges(request: Request, settings: OpenVinoSettings, builder: ControlBuilder) -> OpenVinoSettings:
    stated = request.policy.execution.shapes.items()
    builder.shapes(request, "the model is reshaped to the range before it is compiled")
    ranged = tuple(name for name, sizes in stated if any(isinstance(size, str) for size in sizes))
    return settings.replace(ranges=ranged)


def _rest(request: Request, builder: ControlBuilder, kind: str) -> None:
    execution = request.policy.execution
    no_split = "the plugin compiles the whole model for its device or refuses it; no other plugin is used"
    builder.add(
        "execution.allow_cpu_ops", "-", "enforced", "every node runs on the CPU here" if kind == "cpu" else no_split
    )
    reason = "streams and threads are fixed when the model is compiled; OpenVINO makes no promise about bits"
    builder.determinism(request, "-", "advisory", reason)
    if execution.layout == "auto":
        builder.add("execution.layout", "-", "enforced", "left to the engine")
    else:
        reason = "the plugin chooses the layout of each node; the evidence says which ran"
        builder.add("execution.layout", "-", "unsupported", reason)
    if execution.cuda_graph == "off":
        builder.add("execution.cuda_graph", "off", "enforced", "no graph is captured")
    else:
        builder.add("execution.cuda_graph", "-", "unsupported", "OpenVINO has no CUDA graphs")
    memory = execution.memory
    if memory.pool == "engine":
        builder.add("execution.memory.pool", "OpenVINO's own", "enforced", "nothing is replaced")
    else:
        builder.add(
            "execution.memory.pool", "-", "unsupported", "OpenVINO takes no outside allocator", "use pool: engine"
        )
    builder.add("execution.memory.limit", "-", "unsupported", "OpenVINO takes no limit")


def _kernels(request: Request, settings: OpenVinoSettings, builder: ControlBuilder) -> OpenVinoSettings:
    reason = "OpenVINO chooses its kernels itself and accepts no choice; the evidence names those that ran"
    for op, use in request.policy.kernels.preferences.items():
        if "auto" in ((use,) if isinstance(use, str) else tuple(use)):
            builder.add(f"kernels.{op}", ENGINE_CHOICE, "enforced", "auto leaves the choice to the engine")
        else:
            fix = "run on the engine onnxruntime, or leave the key out"
            builder.add(f"kernels.{op}", "-", "unsupported", reason, fix)
    for index, rule in enumerate(request.policy.kernels.rules):
        key, glob = f"kernels.rules[{index}]", fp32_nodes(rule)
        if glob is not None and settings.quantize:
            settings = settings.replace(keep_fp32=(*settings.keep_fp32, glob))
            builder.add(key, f"nodes {glob} stay fp32", "enforced", "the quantizer leaves them alone")
        else:
            builder.add(key, "-", "unsupported", reason)
    builder.add("kernels.auto_strategy", "-", "unsupported", reason)
    return settings
