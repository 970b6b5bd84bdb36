# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of ONNX Runtime for the execution keys of a policy, on the CPU and on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.control_builder import ControlBuilder, show
from xpuruntime.engines.model.graph import graphs
from xpuruntime.engines.onnxruntime.arithmetic import INTEGER_OPS, OPERATORS, QDQ_LEVEL, QDQ_OFF, quantises_activations
from xpuruntime.engines.onnxruntime.kernel_controls import KernelKeys
from xpuruntime.engines.onnxruntime.options import (
    CPU_OPTIONS,
    CUDA_OPTIONS,
    NAMES,
    SESSION_OPTIONS,
)
from xpuruntime.engines.onnxruntime.settings import OnnxRuntimeSettings
from xpuruntime.engines.onnxruntime.trial import CONFUSED_BY_CASTS, DISABLED, SAFE_LEVEL
from xpuruntime.engines.options import check_options, own_options
from xpuruntime.engines.precision.other_floats import other_floats
from xpuruntime.engines.quantisation.judge import quantises
from xpuruntime.engines.saturation import saturates_on, saturating_nodes

if TYPE_CHECKING:
    from collections.abc import Collection

    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

__all__ = ["resolve_settings"]

#: Has 8-bit products summed up exactly on processors without VNNI.
_EXACT = "session.x64quantprecision"
#: Nodes that a control names.
_NAMED = 3


def resolve_settings(
    request: Request, capability: tuple[int, int] | None = None, *, features: Collection[str] = ()
) -> tuple[OnnxRuntimeSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for ONNX Runtime on its device. Pure.

    `capability` is the compute capability of a CUDA device, for the xpuruntime kernels; `features` are those
    of the processor.

    Raises
    ------
    PolicyError
        For a provider option that is unknown or out of range.
    """
    cuda = request.device.startswith("cuda")
    policy = request.policy
    settings = OnnxRuntimeSettings(
        provider="CUDAExecutionProvider" if cuda else "CPUExecutionProvider", strict=policy.mode == "strict"
    )
    builder = ControlBuilder(policy.stated())
    builder.common(request, "onnxruntime", checked="checked against the node assignment after loading")
    settings = _given_options(request, settings, builder, cuda=cuda)
    if not cuda and request.artifact is None and saturates_on(features) and saturating_nodes(request.model):
        settings = _on_unless_stated(settings, _EXACT)
    settings = _placement(request, settings, builder, cuda=cuda)
    settings = _precision(request, settings, builder, cuda=cuda)
    settings = _execution(request, settings, builder, cuda=cuda)
    settings = _memory(request, settings, builder, cuda=cuda)
    settings = KernelKeys(request, settings, builder, capability).resolve()
    return settings, builder.finish("ONNX Runtime")


def _on_unless_stated(settings: OnnxRuntimeSettings, entry: str) -> OnnxRuntimeSettings:
    """Return the settings with a session entry switched on, unless the policy states it."""
    return settings if entry in settings.session else settings.with_session({entry: "1"})


def _given_options(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    given = own_options(request.policy.execution.provider_options, NAMES)
    session = {name: given.pop(name) for name in list(given) if name in SESSION_OPTIONS or "." in name}
    where = "execution.provider_options.onnxruntime"
    provider = CUDA_OPTIONS if cuda else CPU_OPTIONS
    options = check_options(given, provider, where, also=SESSION_OPTIONS)
    entries = check_options(session, SESSION_OPTIONS, where, also=provider)
    converts = not cuda and request.policy.execution.precision in ("fp16", "bf16")
    level_stated = "graph_optimization_level" in entries
    level = entries.pop("graph_optimization_level", SAFE_LEVEL if converts else "all")
    if converts and not level_stated:
        entries.setdefault(DISABLED, ";".join(CONFUSED_BY_CASTS))
    for name in [] if cuda else [name for name in entries if name.startswith("ep.")]:
        del entries[name]  # ONNX Runtime would keep it, and nobody reads it
        reason = "it is for a provider that does not run here: ONNX Runtime would accept it silently"
        for alias in NAMES:
            key = f"execution.provider_options.{alias}.{name}"
            builder.add(key, "-", "unsupported", reason, "remove the key, or use the device that it is for")
    builder.options(where, NAMES, "validated and handed to ONNX Runtime; provider options are read back after loading")
    return settings.replace(options=options, session=entries, level=level, level_stated=level_stated)


def _placement(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    execution = request.policy.execution
    if cuda:
        builder.add(
            "execution.allow_cpu_ops",
            show(execution.allow_cpu_ops),
            "enforced",
            "any other node on the CPU provider is refused at load",
        )
        settings = settings.replace(allow_cpu_ops=tuple(execution.allow_cpu_ops))
        return settings.with_options({"device_id": request.device.partition(":")[2] or "0"})
    builder.add("execution.allow_cpu_ops", "-", "enforced", "every node runs on the CPU here")
    return settings


def _precision(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    execution = request.policy.execution
    precision, tf32 = execution.precision, execution.tf32
    settings = _keep_activations(request, settings)
    if precision in ("fp16", "bf16"):
        settings = _half_precision(settings, builder, precision, cuda=cuda)
    elif precision == "int8":
        settings = _int8(request, settings, builder, cuda=cuda)
    elif precision == "fp32":
        _fp32(request, settings, builder, cuda=cuda)
    elif precision == "tf32":
        builder.add(
            "execution.precision",
            "use_tf32=1" if cuda else "-",
            "enforced" if cuda else "unsupported",
            "TF32 is allowed for fp32 matmul and conv" if cuda else "the CPU has no TF32",
        )
    else:
        builder.add("execution.precision", "the model's own types", "enforced", "nothing is converted")
    _integers(request, builder)
    _other_floats(request, builder)
    if cuda:
        allowed = tf32 if tf32 is not None else {"fp32": False, "tf32": True}.get(precision)
        if allowed is not None:
            settings = settings.with_options({"use_tf32": "1" if allowed else "0"})
        builder.add(
            "execution.tf32",
            f"use_tf32={settings.options.get('use_tf32', '1')}",
            "enforced",
            "provider option, read back after loading",
        )
    else:
        builder.add("execution.tf32", "-", "enforced" if tf32 is False else "unsupported", "the CPU has no TF32")
    return settings


def _half_precision(
    settings: OnnxRuntimeSettings, builder: ControlBuilder, precision: str, *, cuda: bool
) -> OnnxRuntimeSettings:
    """Have the graph converted to fp16 or bf16."""
    settings = settings.replace(convert=precision)
    if cuda:
        builder.add(
            "execution.precision",
            f"graph converted to {precision}",
            "enforced",
            "the weights and types in the graph change, and a probe input is compared with fp32",
        )
    else:
        builder.add(
            "execution.precision",
            f"graph converted to {precision}",
            "advisory",
            "the CPU provider has few fp16 kernels and computes the other nodes in fp32 between casts; the graph "
            f"is optimised at level {settings.level}"
            + ("" if settings.level_stated else ", since fusions above it fail or crash on graphs with casts"),
            "use device cuda:0, or precision fp32",
        )
    return settings


def _fp32(request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool) -> None:
    """State what keeps the arithmetic in fp32; TF32 is switched off with ``execution.tf32``."""
    resolved = "use_tf32=0" if cuda else "the model's own types"
    if QDQ_LEVEL in settings.session:
        resolved += f", {QDQ_LEVEL}={settings.session[QDQ_LEVEL]}"
    reason = (
        "fp32 excludes TF32, which ONNX Runtime's CUDA provider uses by default"
        if cuda
        else "the CPU provider computes fp32 in fp32"
    )
    if not request.model.quantisation.activations:
        builder.add("execution.precision", resolved, "enforced", reason)
    elif settings.session.get(QDQ_OFF) == "1":
        builder.add("execution.precision", f"{resolved}, {QDQ_OFF}=1", "enforced", reason)
    else:
        builder.add(
            "execution.precision",
            resolved,
            "advisory",
            f"{reason}, but ONNX Runtime may compute what stands between QuantizeLinear and DequantizeLinear in "
            "integers; the evidence names those nodes",
            f"state {QDQ_OFF}: '1' in execution.provider_options.onnxruntime, or precision model or int8",
        )


def _keep_activations(request: Request, settings: OnnxRuntimeSettings) -> OnnxRuntimeSettings:
    """Have products with dequantised weights computed in the type of their activations, unless int8 is asked for.

    ONNX Runtime fuses them into MatMulNBits, and by default quantises the activations to int8.
    """
    scheme, precision = request.model.quantisation.scheme, request.policy.execution.precision
    kept = scheme == "weight_only" if precision == "model" else precision != "int8"
    ops = {name.rpartition(":")[2] for name in request.model.ops}
    if kept and "DequantizeLinear" in ops and ops & {"MatMul", "Gemm"}:
        return _on_unless_stated(settings, QDQ_LEVEL)
    return settings


def _integers(request: Request, builder: ControlBuilder) -> None:
    """Say that a float precision does not reach nodes of a model that are integer operators."""
    if request.policy.execution.precision in ("model", "int8") or not (named := _integer_nodes(request)):
        return
    for place, control in enumerate(builder.controls):
        if control.key == "execution.precision":
            builder.controls[place] = msgspec.structs.replace(
                control,
                enforceability="unsupported",
                reason=f"the model itself computes in integers, whatever the policy says: {named}",
                fix="state precision model or int8, or give the model as it was before it was quantised",
            )


def _other_floats(request: Request, builder: ControlBuilder) -> None:
    """Say that fp32 does not reach nodes of a model that state another floating-point type."""
    if request.policy.execution.precision not in ("fp32", "tf32") or request.artifact is not None:
        return
    named = other_floats(request.model, ("fp64", "fp16", "bf16"))
    for place, control in enumerate(builder.controls if named else ()):
        if control.key == "execution.precision" and control.enforceability == "enforced":
            builder.controls[place] = msgspec.structs.replace(
                control,
                enforceability="unsupported",
                reason=f"the model itself computes in other types, whatever the policy says: {named}",
                fix="state precision model, or export the model in float32",
            )


def _integer_nodes(request: Request) -> str:
    """Return some of the nodes that the model itself states to multiply in integers; empty where there are none."""
    model = request.model
    ops = {name.rpartition(":")[2] for name in model.ops}
    if not ops & OPERATORS.keys():
        return ""
    found = [f"{node.name!r} ({node.op})" for node in model.nodes if node.op in INTEGER_OPS]
    if "MatMulNBits" in ops:
        for graph in graphs(model.named_proto()):
            for node in graph.node:
                numbers = {str(one.name): int(one.i) for one in node.attribute}
                if node.op_type == "MatMulNBits" and quantises_activations(node.op_type, numbers):
                    found.append(f"{node.name!r} (MatMulNBits, accuracy_level 4)")
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _int8(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    if quantises(request):
        settings = settings.replace(qdq="ort-cuda" if cuda else "ort-cpu")
        resolved = f"graph quantised from {request.calibration.count} calibration samples"
    else:
        resolved = f"the model's own quantisation ({request.model.quantisation.scheme})"
    if cuda:
        builder.add(
            "execution.precision",
            resolved,
            "advisory",
            "the CUDA provider rounds values to int8 and back, and computes convolutions and products in floats",
            "use engine tensorrt, which computes int8, or precision fp16, which is faster here",
        )
    elif settings.qdq is not None:
        reason = "convolutions and products with constant weights become integer operators; the report has the others"
        builder.add("execution.precision", resolved, "enforced", reason)
    else:
        builder.add("execution.precision", resolved, "enforced", "nothing is converted")
    return settings


def _execution(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    execution = request.policy.execution
    options: dict[str, str] = {}
    builder.add("execution.threads", f"intra_op_num_threads={execution.threads}", "enforced", "session option")
    if execution.deterministic and cuda:
        options.update(cudnn_conv_algo_search="HEURISTIC", tunable_op_enable="0")
        builder.determinism(
            request,
            "use_deterministic_compute, cudnn_conv_algo_search=HEURISTIC",
            "advisory",
            (
                "timed algorithm search is off and deterministic kernels are asked for; ONNX Runtime does "
                "not promise it for every op"
            ),
        )
    elif execution.deterministic:
        builder.determinism(
            request,
            "use_deterministic_compute",
            "advisory",
            "deterministic kernels are asked for; ONNX Runtime does not promise it for every op",
        )
    if execution.layout == "nhwc":
        options.update({"prefer_nhwc": "1"} if cuda else {})
        builder.add(
            "execution.layout",
            "prefer_nhwc=1" if cuda else "-",
            "enforced" if cuda else "unsupported",
            "provider option; seen in the evidence as the nhwc domain"
            if cuda
            else "the CPU provider chooses its own blocked layout",
        )
    elif execution.layout == "nchw":
        options.update({"prefer_nhwc": "0"} if cuda else {})
        builder.add(
            "execution.layout",
            "prefer_nhwc=0" if cuda else "-",
            "enforced" if cuda else "advisory",
            "provider option" if cuda else "inside, the CPU provider may use blocked NCHWc",
        )
    else:
        builder.add("execution.layout", "-", "enforced", "left to the engine")
    builder.shapes(request, "ONNX Runtime takes any size, so nothing is built for a range")
    if execution.cuda_graph == "off":
        builder.add("execution.cuda_graph", "off", "enforced", "no graph is captured")
    elif cuda:
        options["enable_cuda_graph"] = "1"
        builder.add(
            "execution.cuda_graph",
            "enable_cuda_graph=1 for bind()",
            "enforced" if execution.cuda_graph == "require" else "advisory",
            "bind() captures or raises"
            if execution.cuda_graph == "require"
            else "captured where every node can be; otherwise bind() says why not",
        )
    else:
        fix = "remove the key, or use device cuda:0"
        builder.add("execution.cuda_graph", "-", "unsupported", "the CPU has no CUDA graphs", fix)
    return settings.with_options(options).replace(
        threads=execution.threads,
        deterministic=execution.deterministic,
        graph=execution.cuda_graph if cuda else "off",
    )


def _memory(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    memory = request.policy.execution.memory
    if not cuda:
        unsupported = "the CPU provider takes no outside allocator"
        builder.add(
            "execution.memory.pool",
            "-",
            "enforced" if memory.pool == "engine" else "unsupported",
            unsupported if memory.pool != "engine" else "ONNX Runtime's own arena",
        )
        builder.add("execution.memory.limit", "-", "unsupported", "the CPU provider takes no limit")
        return settings
    refusal = _pool_refusal(memory.pool, request.policy.execution.cuda_graph)
    if memory.pool != "engine" and refusal is None:
        reason = (
            "every allocation of the provider goes through the pool. It takes no xpuruntime stream beside it, "
            "so each run waits on the host for the caller's stream and for its own end"
        )
        resolved = f"gpu_external_alloc from a {memory.pool} xpuruntime pool"
        builder.add("execution.memory.pool", resolved, "enforced", reason)
        builder.add("execution.memory.limit", f"pool limit {memory.limit}", "enforced", "limit of the pool")
        return settings.replace(pool=memory.pool, pool_limit=memory.limit)
    if memory.limit is not None:
        strategy = {"arena_extend_strategy": "kSameAsRequested"}
        options = {**strategy, **settings.options, "gpu_mem_limit": str(memory.limit)}
        settings = settings.replace(options=options, pool_limit=memory.limit)
    if refusal is None:
        builder.add("execution.memory.pool", "ONNX Runtime's own arena", "enforced", "nothing is replaced")
    else:
        builder.add("execution.memory.pool", "ONNX Runtime's own arena", "unsupported", *refusal)
    builder.add(
        "execution.memory.limit",
        f"gpu_mem_limit={memory.limit}",
        "enforced",
        "limit of the arena; workspaces of cuBLAS and cuDNN handles come on top",
    )
    return settings


def _pool_refusal(pool: str, graph: str) -> tuple[str, str] | None:
    """Return why an xpuruntime pool cannot serve the provider, and the fix."""
    if pool == "driver":
        return "memory of the driver's pool is ordered by a stream, and the provider passes none", "use pool: caching"
    if pool != "engine" and graph != "off":
        return (
            "a captured graph replays into addresses that an outside pool may have given away",
            "use pool: engine with cuda_graph, or drop cuda_graph",
        )
    return None
