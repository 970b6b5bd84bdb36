# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of ONNX Runtime for the execution keys of a policy, on the CPU and on CUDA."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.control_builder import ControlBuilder, check_options, own_options, show
from xpuruntime.engines.onnxruntime.kernel_controls import KernelKeys
from xpuruntime.engines.onnxruntime.options import (
    AFFINITIES,
    CONFUSED_BY_CASTS,
    CPU_OPTIONS,
    CUDA_OPTIONS,
    DENORMALS,
    DISABLED,
    INTER_THREADS,
    NAMES,
    OPERATOR_LIBRARIES,
    SAFE_LEVEL,
    SESSION_OPTIONS,
    OnnxRuntimeSettings,
)
from xpuruntime.engines.onnxruntime.precision_controls import on_unless_stated, resolve_precision, resolve_weights
from xpuruntime.engines.quantization.judge import saturates_on, saturating_nodes
from xpuruntime.errors import PolicyError
from xpuruntime.runtime.libraries.loading import EXTENSIONS

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

#: Has 8-bit products summed up exactly on processors without VNNI.
_EXACT = "session.x64quantprecision"


def resolve_settings(
    request: Request, capability: tuple[int, int] | None = None, *, features: Collection[str] = ()
) -> tuple[OnnxRuntimeSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for ONNX Runtime on its device. Pure.

    `capability` is the compute capability of a CUDA device, for the xpuruntime kernels; `features` are those
    of the processor.
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
        settings = on_unless_stated(settings, _EXACT)
    settings = _placement(request, settings, builder, cuda=cuda)
    settings = resolve_precision(request, settings, builder, cuda=cuda)
    resolve_weights(request, builder, cuda=cuda)
    settings = _execution(request, settings, builder, cuda=cuda)
    settings = _memory(request, settings, builder, cuda=cuda)
    settings = KernelKeys(request, settings, builder, capability).resolve()
    return settings, builder.finish("ONNX Runtime")


def _given_options(
    request: Request, settings: OnnxRuntimeSettings, builder: ControlBuilder, *, cuda: bool
) -> OnnxRuntimeSettings:
    own = own_options(request.policy.execution.provider_options, NAMES)
    session = {name: own.pop(name) for name in list(own) if name in SESSION_OPTIONS or "." in name}
    where = "execution.provider_options.onnxruntime"
    provider = CUDA_OPTIONS if cuda else CPU_OPTIONS
    options = check_options(own, provider, where, also=SESSION_OPTIONS)
    entries = check_options(session, SESSION_OPTIONS, where, also=provider)
    converts = not cuda and request.policy.execution.precision in ("fp16", "bf16")
    level_stated = "graph_optimization_level" in entries
    level = entries.pop("graph_optimization_level", SAFE_LEVEL if converts else "all")
    if converts and not level_stated:
        entries.setdefault(DISABLED, ";".join(CONFUSED_BY_CASTS))
    if AFFINITIES in entries:
        _check_affinities(f"{where}.{AFFINITIES}", entries[AFFINITIES], request.policy.execution.threads)
    unused = [INTER_THREADS] if cuda else [name for name in entries if name.startswith("ep.")]
    for name in [name for name in unused if name in entries]:
        del entries[name]  # ONNX Runtime would keep it, and nobody reads it
        reason = "it is for a provider that does not run here: ONNX Runtime would accept it silently"
        for alias in NAMES:
            key = f"execution.provider_options.{alias}.{name}"
            builder.add(key, "-", "unsupported", reason, "use the device that it is for, or leave the key out")
    inter = entries.pop(INTER_THREADS, None)
    libraries = _operator_libraries(f"{where}.{OPERATOR_LIBRARIES}", entries.pop(OPERATOR_LIBRARIES, ""))
    if entries.pop(DENORMALS, None) is not None:
        reason = (
            "ONNX Runtime sets it for good on the thread that opens the first session, also for what the program "
            "computes there itself, and not for the calling threads of later sessions"
        )
        for alias in NAMES:
            builder.add(f"execution.provider_options.{alias}.{DENORMALS}", "-", "unsupported", reason, "leave it out")
    builder.options(where, NAMES, "validated and handed to ONNX Runtime; provider options are read back after loading")
    return settings.replace(
        options=options,
        session=entries,
        level=level,
        level_stated=level_stated,
        inter_threads=None if inter is None else int(inter),
        operator_libraries=libraries,
    )


def _operator_libraries(key: str, text: str) -> tuple[str, ...]:
    """Return the libraries that a policy names. A relative path is refused: its code would depend on the folder."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name != EXTENSIONS and not Path(name).is_absolute():
            fix = f"{key}: {Path(name).absolute()}, or {EXTENSIONS}"
            raise PolicyError(f"{key}: {name!r} is no absolute path", fix=fix, engine="onnxruntime")
    return names


def _check_affinities(key: str, text: str, threads: int | None) -> None:
    """Refuse affinities that do not fit the threads: ONNX Runtime has an entry for each but the caller's."""
    entries = text.split(";")
    ranged = r"[1-9][0-9]{0,4}(-[1-9][0-9]{0,4})?"
    if not all(re.fullmatch(rf"{ranged}(,{ranged})*", entry) for entry in entries):
        fix = f"{key}: '1,2;3-4', processors from 1 on, with ';' between threads"
        raise PolicyError(f"{key}: {text!r} is no list of processors for each thread", fix=fix, engine="onnxruntime")
    if threads != len(entries) + 1:
        stated = "is not stated" if threads is None else f"is {threads}"
        raise PolicyError(
            f"{key} has {len(entries)} entries, one for each thread but the caller's, and execution.threads {stated}",
            fix=f"execution.threads: {len(entries) + 1}",
            engine="onnxruntime",
        )


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
        fix = "use device cuda:0, or leave the key out"
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
    if pool == "driver":
        return "memory of the driver's pool is ordered by a stream, and the provider passes none", "use pool: caching"
    if pool != "engine" and graph != "off":
        return (
            "a captured graph replays into addresses that an outside pool may have given away",
            "use pool: engine with cuda_graph, or drop cuda_graph",
        )
    return None
