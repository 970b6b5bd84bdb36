# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What ONNX Runtime can do with the execution and accuracy keys of a policy, on the CPU and on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.book import Book, show
from xpuruntime.engines.onnxruntime.kernel_controls import settle_kernels, settle_rules
from xpuruntime.engines.onnxruntime.options import (
    CPU_OPTIONS,
    CUDA_OPTIONS,
    NAMES,
    SESSION_OPTIONS,
    check_options,
    own_options,
)
from xpuruntime.engines.onnxruntime.settings import Settings

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

__all__ = ["PROBED", "settle"]

#: What becomes of the accuracy keys, here and in the evidence.
PROBED = "probe input held against fp32 on the CPU"
#: Engines that a portable policy may hold options for while another one runs.
_OTHERS = ("openvino", "qnn", "tensorrt", "torch", "null")


def settle(request: Request) -> tuple[Settings, tuple[Control, ...]]:
    """Resolve the policy of `request` for ONNX Runtime on its device. Pure.

    Raises
    ------
    PolicyError
        For a provider option that is unknown or out of range.
    """
    cuda = request.device.startswith("cuda")
    policy = request.policy
    settings = Settings(
        provider="CUDAExecutionProvider" if cuda else "CPUExecutionProvider", strict=policy.mode == "strict"
    )
    book = Book(policy.stated())
    _given_options(request, settings, book, cuda=cuda)
    _placement(request, settings, book, cuda=cuda)
    _precision(request, settings, book, cuda=cuda)
    _execution(request, settings, book, cuda=cuda)
    _memory(request, settings, book, cuda=cuda)
    settle_kernels(request, settings, book, cuda=cuda)
    settle_rules(request, settings, book)
    _accuracy(request, book)
    return settings, tuple(book.controls)


def _accuracy(request: Request, book: Book) -> None:
    book.add(
        "kernels.auto_strategy",
        "-",
        "unsupported",
        "ONNX Runtime chooses its kernels itself; nothing is tuned here",
        "remove the key, or use mode: prefer",
    )
    wanted = request.policy.accuracy
    reference = "onnxruntime.cpu.fp32"
    for key in book.stated:
        if key == "accuracy.reference" and wanted is not None and wanted.reference != reference:
            book.add(
                key,
                reference,
                "unsupported",
                f"the reference of this engine is {reference}",
                f"state reference: {reference}",
            )
        elif key.startswith("accuracy."):
            book.add(
                key,
                PROBED,
                "enforced",
                "the session is refused beyond the tolerance",
            )


def _given_options(request: Request, settings: Settings, book: Book, *, cuda: bool) -> None:
    given = own_options(request.policy.execution.provider_options)
    session = {name: given.pop(name) for name in list(given) if name in SESSION_OPTIONS or "." in name}
    where = "execution.provider_options.onnxruntime"
    provider = CUDA_OPTIONS if cuda else CPU_OPTIONS
    settings.options.update(check_options(given, provider, where, also=SESSION_OPTIONS))
    settings.session.update(check_options(session, SESSION_OPTIONS, where, also=provider))
    settings.level = settings.session.pop("graph_optimization_level", "all")
    for key in book.stated:
        if not key.startswith("execution.provider_options."):
            continue
        engine = key.split(".")[2]
        if engine in NAMES:
            book.add(
                key,
                show(book.stated[key]),
                "enforced",
                "validated and handed to ONNX Runtime; provider options are read back after loading",
            )
        elif engine in _OTHERS or engine in request.policy.execution.engine:
            book.add(key, "-", "enforced", f"used when {engine} runs, and only then")
        else:
            book.add(
                key,
                "-",
                "unsupported",
                f"onnxruntime runs, and the policy names no engine {engine!r}",
                f"remove the key, or write {where} if {engine!r} was meant to be that",
            )


def _placement(request: Request, settings: Settings, book: Book, *, cuda: bool) -> None:
    execution = request.policy.execution
    book.add("execution.engine", "onnxruntime", "enforced", "checked against the session's own provider list")
    book.add("execution.device", request.device, "enforced", "checked against the node assignment after loading")
    book.add(
        "execution.fallback", show(execution.fallback), "enforced", "the plan changes engine or device only as listed"
    )
    settings.allow_cpu_ops = tuple(execution.allow_cpu_ops) if cuda else ()
    if cuda:
        book.add(
            "execution.allow_cpu_ops",
            show(execution.allow_cpu_ops),
            "enforced",
            "any other node on the CPU provider is refused at load",
        )
        settings.options["device_id"] = request.device.partition(":")[2] or "0"
    else:
        book.add("execution.allow_cpu_ops", "-", "enforced", "every node runs on the CPU here")


def _precision(request: Request, settings: Settings, book: Book, *, cuda: bool) -> None:
    execution = request.policy.execution
    precision, tf32 = execution.precision, execution.tf32
    if precision in ("fp16", "bf16"):
        settings.convert = precision
        if cuda:
            book.add(
                "execution.precision",
                f"graph converted to {precision}",
                "enforced",
                "the weights and types in the graph change, and a probe input is held against fp32",
            )
        else:
            book.add(
                "execution.precision",
                f"graph converted to {precision}",
                "advisory",
                "the CPU provider has few fp16 kernels and computes the other nodes in fp32 between casts",
                "use device cuda:0, or precision fp32",
            )
    elif precision == "fp32":
        resolved = "use_tf32=0" if cuda else "the model's own types"
        book.add(
            "execution.precision",
            resolved,
            "enforced",
            "fp32 excludes TF32, which ONNX Runtime's CUDA provider uses unless told"
            if cuda
            else "the CPU provider computes fp32 in fp32",
        )
    elif precision == "tf32":
        book.add(
            "execution.precision",
            "use_tf32=1" if cuda else "-",
            "enforced" if cuda else "unsupported",
            "TF32 is allowed for fp32 matmul and conv" if cuda else "the CPU has no TF32",
        )
    else:
        book.add("execution.precision", "the model's own types", "enforced", "nothing is converted")
    if cuda:
        allowed = tf32 if tf32 is not None else {"fp32": False, "tf32": True}.get(precision)
        if allowed is not None:
            settings.options["use_tf32"] = "1" if allowed else "0"
        book.add(
            "execution.tf32",
            f"use_tf32={settings.options.get('use_tf32', '1')}",
            "enforced",
            "provider option, read back after loading",
        )
    else:
        book.add("execution.tf32", "-", "enforced" if tf32 is False else "unsupported", "the CPU has no TF32")


def _execution(request: Request, settings: Settings, book: Book, *, cuda: bool) -> None:
    execution = request.policy.execution
    settings.threads = execution.threads
    book.add("execution.threads", f"intra_op_num_threads={execution.threads}", "enforced", "session option")
    settings.deterministic = execution.determinism == "run_to_run"
    if settings.deterministic and cuda:
        settings.options["cudnn_conv_algo_search"] = "HEURISTIC"
        settings.options["tunable_op_enable"] = "0"
        book.add(
            "execution.determinism",
            "use_deterministic_compute, cudnn_conv_algo_search=HEURISTIC",
            "advisory",
            (
                "timed algorithm search is off and deterministic kernels are asked for; ONNX Runtime does "
                "not promise it for every op"
            ),
        )
    elif settings.deterministic:
        book.add(
            "execution.determinism",
            "use_deterministic_compute",
            "advisory",
            "deterministic kernels are asked for; ONNX Runtime does not promise it for every op",
        )
    else:
        book.add("execution.determinism", "-", "enforced", "nothing asked")
    if execution.layout == "nhwc":
        settings.options.update({"prefer_nhwc": "1"} if cuda else {})
        book.add(
            "execution.layout",
            "prefer_nhwc=1" if cuda else "-",
            "enforced" if cuda else "unsupported",
            "provider option; seen in the evidence as the nhwc domain"
            if cuda
            else "the CPU provider chooses its own blocked layout",
        )
    elif execution.layout == "nchw":
        settings.options.update({"prefer_nhwc": "0"} if cuda else {})
        book.add(
            "execution.layout",
            "prefer_nhwc=0" if cuda else "-",
            "enforced" if cuda else "advisory",
            "provider option" if cuda else "inside, the CPU provider may use blocked NCHWc",
        )
    else:
        book.add("execution.layout", "-", "enforced", "left to the engine")
    dynamic = [i.name for i in request.model.inputs if not all(isinstance(d, int) for d in (i.shape or ("?",)))]
    if execution.static_shape and dynamic:
        book.add(
            "execution.static_shape",
            "-",
            "advisory",
            f"the model's own shapes are dynamic ({', '.join(dynamic)}); bind() fixes them per binding",
        )
    else:
        book.add(
            "execution.static_shape",
            "the model's own shapes",
            "enforced",
            "the model's shapes are fixed" if not dynamic else "nothing asked",
        )
    settings.graph = execution.cuda_graph if cuda else "off"
    if execution.cuda_graph == "off":
        book.add("execution.cuda_graph", "off", "enforced", "no graph is captured")
    elif cuda:
        settings.options["enable_cuda_graph"] = "1"
        book.add(
            "execution.cuda_graph",
            "enable_cuda_graph=1 for bind()",
            "enforced" if execution.cuda_graph == "require" else "advisory",
            "bind() captures or raises"
            if execution.cuda_graph == "require"
            else "captured where every node can be; otherwise bind() says why not",
        )
    else:
        fix = "remove the key, or use device cuda:0"
        book.add("execution.cuda_graph", "-", "unsupported", "the CPU has no CUDA graphs", fix)


def _memory(request: Request, settings: Settings, book: Book, *, cuda: bool) -> None:
    memory = request.policy.execution.memory
    settings.pool, settings.pool_limit = memory.pool, memory.limit
    if not cuda:
        settings.pool, settings.pool_limit = "engine", None
        unsupported = "the CPU provider takes no outside allocator"
        book.add(
            "execution.memory.pool",
            "-",
            "enforced" if memory.pool == "engine" else "unsupported",
            unsupported if memory.pool != "engine" else "ONNX Runtime's own arena",
        )
        book.add("execution.memory.limit", "-", "unsupported", "the CPU provider takes no limit")
        return
    refusal = _pool_refusal(memory.pool, request.policy.execution.cuda_graph)
    if memory.pool != "engine" and refusal is None:
        reason = (
            "every allocation of the provider goes through the pool. ONNX Runtime takes no stream of ours beside it, "
            "so each run waits on the host for the caller's stream and for its own end"
        )
        resolved = f"gpu_external_alloc from a {memory.pool} pool of ours"
        book.add("execution.memory.pool", resolved, "enforced", reason)
        book.add("execution.memory.limit", f"pool limit {memory.limit}", "enforced", "limit of the pool")
        return
    settings.pool = "engine"
    if memory.limit is not None:
        settings.options["gpu_mem_limit"] = str(memory.limit)
        settings.options.setdefault("arena_extend_strategy", "kSameAsRequested")
    if refusal is None:
        book.add("execution.memory.pool", "ONNX Runtime's own arena", "enforced", "nothing is replaced")
    else:
        book.add("execution.memory.pool", "ONNX Runtime's own arena", "unsupported", *refusal)
    book.add(
        "execution.memory.limit",
        f"gpu_mem_limit={memory.limit}",
        "enforced",
        "limit of the arena; workspaces of cuBLAS and cuDNN handles come on top",
    )


def _pool_refusal(pool: str, graph: str) -> tuple[str, str] | None:
    """Return why a pool of ours cannot serve the provider, and the fix."""
    if pool == "driver":
        return "memory of the driver's pool is ordered by a stream, and the provider tells none", "use pool: caching"
    if pool != "engine" and graph != "off":
        return (
            "a captured graph replays into addresses that an outside pool may have given away",
            "use pool: engine with cuda_graph, or drop cuda_graph",
        )
    return None
