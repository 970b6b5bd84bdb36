# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options and settings of ONNX Runtime's engine, and their values as a session reports them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec

from xpuruntime.engines.base import EngineSettings, Observed, Request
from xpuruntime.engines.control_builder import BOOL, Option
from xpuruntime.engines.model.shapes import read_shapes
from xpuruntime.runtime.libraries.loading import mapped_paths, operator_library

#: What a policy may call this engine.
NAMES = ("onnxruntime", "ort", "onnxrt")

#: The level of converted graphs on the CPU where none is stated. Fusions above it look through casts and end the
#: process: MatmulTransposeFusion followed by NchwcTransformer.
SAFE_LEVEL = "basic"
#: Fusions at that level that look through casts too, and make invalid graphs.
CONFUSED_BY_CASTS = ("LayerNormFusionL1", "GeluFusionL1")
#: The same at all levels.
LAYER_FUSIONS = (*CONFUSED_BY_CASTS, "LayerNormFusionL2", "GeluFusionL2", "SimplifiedLayerNormFusion")
DISABLED = "optimization.disable_specified_optimizers"
#: Processors of each thread beside the caller's.
AFFINITIES = "session.intra_op_thread_affinities"
INTER_THREADS = "inter_op_num_threads"
OPERATOR_LIBRARIES = "custom_op_libraries"
DENORMALS = "session.set_denormal_as_zero"

CUDA_OPTIONS: dict[str, Option] = {
    "device_id": Option(meaning="device index", owned_by="execution.device"),
    "user_compute_stream": Option(meaning="stream address", owned_by="the session's own stream"),
    "has_user_compute_stream": Option(meaning="stream given", values=BOOL, owned_by="the session's own stream"),
    "gpu_mem_limit": Option(meaning="arena limit in bytes", low=1, owned_by="execution.memory.limit"),
    "gpu_external_alloc": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "gpu_external_free": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "gpu_external_empty_cache": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "use_tf32": Option(meaning="TF32 in fp32 matmul and conv", values=BOOL, owned_by="execution.tf32"),
    "prefer_nhwc": Option(meaning="NHWC convolutions", values=BOOL, owned_by="execution.layout"),
    "enable_cuda_graph": Option(meaning="CUDA graph capture", values=BOOL, owned_by="execution.cuda_graph"),
    "sdpa_kernel": Option(meaning="bit set of attention kernels", high=1023, owned_by="kernels.attention"),
    "cudnn_conv_algo_search": Option(
        meaning="how cuDNN picks convolution algorithms",
        values=("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        owned_by="kernels.conv",
    ),
    "arena_extend_strategy": Option(meaning="how the arena grows", values=("kNextPowerOfTwo", "kSameAsRequested")),
    "do_copy_in_default_stream": Option(meaning="copies on the compute stream", values=BOOL),
    "cudnn_conv_use_max_workspace": Option(meaning="let cuDNN take as much workspace as it wants", values=BOOL),
    "cudnn_conv1d_pad_to_nc1d": Option(meaning="pad 1-D convolutions to NC1D instead of NCD1", values=BOOL),
    "enable_cudnn": Option(meaning="use cuDNN at all", values=BOOL),
    "fuse_conv_bias": Option(meaning="fuse bias into convolutions (cuDNN frontend)", values=BOOL, search=("1",)),
    "enable_skip_layer_norm_strict_mode": Option(meaning="fp32 accumulation in SkipLayerNorm", values=BOOL),
    "tunable_op_enable": Option(meaning="use tuned kernels", values=BOOL),
    "tunable_op_tuning_enable": Option(meaning="tune while running", values=BOOL),
    "tunable_op_max_tuning_duration_ms": Option(meaning="tuning time per op in ms", high=2**31 - 1),
    "use_ep_level_unified_stream": Option(meaning="one stream for all threads", values=BOOL),
    "external_data_loader_reading_threads": Option(meaning="threads reading external data", low=1, high=1024),
}

CPU_OPTIONS: dict[str, Option] = {
    "use_arena": Option(meaning="arena allocator", values=BOOL),
}

_ONE_ADAPTER = "execution.device, which names one adapter"

MIGRAPHX_OPTIONS: dict[str, Option] = {
    "device_id": Option(meaning="device index", owned_by="execution.device"),
    "migraphx_fp16_enable": Option(meaning="compute in fp16", values=BOOL, owned_by="execution.precision"),
    "migraphx_bf16_enable": Option(meaning="compute in bf16", values=BOOL, owned_by="execution.precision"),
    "migraphx_fp8_enable": Option(meaning="compute in fp8", values=BOOL, owned_by="execution.precision"),
    "migraphx_int8_enable": Option(meaning="quantize to int8", values=BOOL, owned_by="execution.precision"),
    "migraphx_mem_limit": Option(meaning="arena limit in bytes", low=1, owned_by="execution.memory.limit"),
    "migraphx_external_alloc": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "migraphx_external_free": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "migraphx_external_empty_cache": Option(meaning="allocator address", owned_by="execution.memory.pool"),
    "migraphx_arena_extend_strategy": Option(
        meaning="how the arena grows", values=("kNextPowerOfTwo", "kSameAsRequested")
    ),
    "migraphx_exhaustive_tune": Option(meaning="time all kernels while compiling", values=BOOL),
    "migraphx_model_cache_dir": Option(meaning="folder of the provider's own compiled models", text=True),
}

COREML_OPTIONS: dict[str, Option] = {
    "ModelFormat": Option(meaning="what the partition becomes", values=("MLProgram", "NeuralNetwork")),
    "MLComputeUnits": Option(
        meaning="what Core ML may compute on; others would leave out the GPU that `metal` names",
        values=("CPUAndGPU", "ALL"),
    ),
    "RequireStaticInputShapes": Option(meaning="take only nodes whose shapes are fixed", values=BOOL),
    "EnableOnSubgraphs": Option(meaning="also inside Loop, Scan and If", values=BOOL),
    "SpecializationStrategy": Option(meaning="what compiling aims at", values=("Default", "FastPrediction")),
    "ProfileComputePlan": Option(meaning="log which unit computes what", values=BOOL),
    "AllowLowPrecisionAccumulationOnGPU": Option(meaning="sum in fp16 on the GPU", values=BOOL),
    "ModelCacheDirectory": Option(meaning="folder of the provider's own compiled models", text=True),
}

DML_OPTIONS: dict[str, Option] = {
    "device_id": Option(meaning="index of the adapter", owned_by="execution.device"),
    "performance_preference": Option(
        meaning="which adapter", values=("default", "high_performance", "minimum_power"), owned_by=_ONE_ADAPTER
    ),
    "device_filter": Option(meaning="which adapters", values=("gpu", "npu", "any"), owned_by=_ONE_ADAPTER),
    "disable_metacommands": Option(meaning="generic shaders instead of the driver's", values=("false", "true")),
}

DML_SESSION_OPTIONS: dict[str, Option] = {
    "ep.dml.enable_graph_capture": Option(meaning="record the commands of a run and replay them", values=BOOL),
    "ep.dml.enable_cpu_sync_spinning": Option(meaning="spin while waiting for the device", values=BOOL),
    "ep.dml.disable_graph_fusion": Option(meaning="no fusion into one DirectML graph", values=BOOL),
    "ep.dml.disable_memory_arena": Option(meaning="free device memory at once", values=BOOL),
}

SESSION_OPTIONS: dict[str, Option] = {
    "session.disable_prepacking": Option(meaning="keep weights as they are", values=BOOL),
    OPERATOR_LIBRARIES: Option(
        meaning="libraries of operators, with commas between: absolute paths, or onnxruntime-extensions", text=True
    ),
    "intra_op_num_threads": Option(meaning="threads of an operator", owned_by="execution.threads"),
    "execution_mode": Option(meaning="operators side by side", owned_by=INTER_THREADS),
    INTER_THREADS: Option(meaning="operators run side by side on this many threads; CPU only", low=1, high=4096),
    AFFINITIES: Option(
        meaning="processors of each thread but the caller's, from 1 on, such as 1,2;3-4: one entry for each thread of "
        "execution.threads but the first",
        text=True,
    ),
    DENORMALS: Option(meaning="denormal numbers are zero; refused, as it would hold for the program", values=BOOL),
    "session.intra_op.allow_spinning": Option(meaning="worker threads spin", values=BOOL, search=("0",)),
    "session.inter_op.allow_spinning": Option(meaning="worker threads spin", values=BOOL),
    "session.force_spinning_stop": Option(meaning="stop spinning after the last run", values=BOOL),
    "session.dynamic_block_base": Option(meaning="work block size base", high=1024, search=("4",)),
    "session.use_env_allocators": Option(meaning="share environment allocators", values=BOOL),
    "session.use_device_allocator_for_initializers": Option(meaning="no arena for weights", values=BOOL),
    "session.qdqisint8allowed": Option(meaning="int8 QDQ", values=BOOL),
    "session.qdq_matmulnbits_accuracy_level": Option(
        meaning="arithmetic of a product with dequantized weights: 1 fp32, 4 int8 activations", high=4
    ),
    "session.disable_quant_qdq": Option(meaning="no QDQ transformation", values=BOOL),
    "session.disable_double_qdq_remover": Option(meaning="keep doubled QDQ pairs", values=BOOL),
    "session.enable_quant_qdq_cleanup": Option(meaning="remove QDQ pairs at the end", values=BOOL),
    "session.x64quantprecision": Option(meaning="precise int8 on old x86", values=BOOL),
    "session.disable_aot_function_inlining": Option(meaning="inline functions late", values=BOOL),
    "session.graph_optimizations_loop_level": Option(meaning="repeat optimizers", high=2),
    "optimization.enable_gelu_approximation": Option(meaning="approximate Gelu", values=BOOL),
    "optimization.enable_cast_chain_elimination": Option(meaning="drop cast chains", values=BOOL),
    "optimization.minimal_build_optimizations": Option(meaning="for saved models", values=("", "save", "apply")),
    "graph_optimization_level": Option(
        meaning="how far the graph is rewritten",
        values=("disable", "basic", "extended", "layout", "all"),
        search=("extended",),
    ),
    "ep.cuda.enable_gemm_auto_tune": Option(meaning="tune cuBLAS algorithms at first use", values=BOOL, search=("1",)),
}


#: Attention families to bits of the CUDA option ``sdpa_kernel``. Bit 16 (math) is never switched off by ONNX Runtime.
ATTENTION_BITS = {
    "flash_v2": 1,
    "efficient": 2,
    "trt_fused": 4,
    "cudnn": 8,
    "cudnn.sdpa": 8,
    "math": 16,
    "trt_flash": 32,
    "trt_cross": 64,
    "trt_causal": 128,
    "lean": 256,
    "decoder": 512,
}

#: Convolution families to the CUDA option ``cudnn_conv_algo_search``.
CONV_SEARCH = {
    "cudnn": "HEURISTIC",
    "cudnn_heuristic": "HEURISTIC",
    "cudnn_exhaustive": "EXHAUSTIVE",
    "cudnn_default": "DEFAULT",
}


def by_option(op: str, word: str, *, cuda: bool) -> bool:
    """Whether a family means ONNX Runtime's own kernels, which an option chooses. An id means an xpuruntime kernel."""
    known = ATTENTION_BITS if op == "attention" else CONV_SEARCH if op == "conv" else ()
    return cuda and "." not in word and word in known


#: Options that belong to one session and not to a copy of it.
_PRIVATE = (
    "user_compute_stream",
    "has_user_compute_stream",
    "gpu_external_alloc",
    "gpu_external_free",
    "gpu_external_empty_cache",
    "enable_cuda_graph",
)


class OnnxRuntimeSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to ONNX Runtime."""

    provider: str
    options: Mapping[str, str] = {}
    session: Mapping[str, str] = {}
    level: Literal["disable", "basic", "extended", "layout", "all"] = "all"
    level_stated: bool = False
    threads: int | None = None
    inter_threads: int | None = None
    operator_libraries: tuple[str, ...] = ()
    deterministic: bool = False
    convert: Literal["fp16", "bf16"] | None = None
    qdq: Literal["ort-cpu", "ort-cuda"] | None = None
    keep_fp32: tuple[str, ...] = ()
    allow_cpu_ops: tuple[str, ...] = ()
    pool: str = "engine"
    pool_limit: int | None = None
    graph: str = "off"
    strict: bool = False
    capability: tuple[int, int] | None = None
    rewrites: Mapping[str, str] = {}
    left: Mapping[str, str] = {}
    tune: bool = False

    @property
    def arch(self) -> str | None:
        """The architecture of the CUDA device as a policy names it, such as ``"sm90"``."""
        return None if self.capability is None else "sm{}{}".format(*self.capability)

    def public(self) -> OnnxRuntimeSettings:
        """Return the settings for a session beside the one they were made for: without its stream, pool and graph."""
        options = {key: value for key, value in self.options.items() if key not in _PRIVATE}
        return self.replace(options=options, pool="engine", pool_limit=None, graph="off")

    def with_options(self, options: Mapping[str, str]) -> OnnxRuntimeSettings:
        """Return the same settings with these provider options, which replace others of the same names."""
        return self.replace(options={**self.options, **options})

    def with_session(self, entries: Mapping[str, str]) -> OnnxRuntimeSettings:
        """Return the same settings with these session entries, which replace others of the same names."""
        return self.replace(session={**self.session, **entries})


def uncompilable(settings: OnnxRuntimeSettings) -> str | None:
    """Return why a session of these settings cannot be compiled, or ``None``."""
    if settings.provider not in ("CPUExecutionProvider", "CUDAExecutionProvider"):
        return (
            f"{settings.provider} compiles parts of the graph itself, and ONNX Runtime writes no such graph to a file"
        )
    if not settings.rewrites and not settings.tune:
        return None
    return (
        "operators of the model become xpuruntime kernels, whose rules are kept by the process and not in a file, so "
        "ONNX Runtime's compiled graph would not have them"
    )


_DEBUG = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
_LINE = r"Operator=(?P<op>\S+) Node=(?P<node>.*?) DataType=(?P<dtype>\S+) SdpaKernel=(?P<kernel>[A-Z0-9_]+)"
_OURS = r"SdpaKernel=|AttentionKernelOptions:|flash=\d, lean=|Unfused kernel cannot be disabled|^\x1b\[0m$"
_OPS = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention")
#: ONNX Runtime's word to the families of the policy.
_FAMILY = {
    "FLASH_ATTENTION": "flash_v2",
    "EFFICIENT_ATTENTION": "efficient",
    "TRT_FUSED_ATTENTION": "trt_fused",
    "CUDNN_FLASH_ATTENTION": "cudnn",
    "MATH": "math",
    "LEAN_ATTENTION": "lean",
    "TRT_FLASH_ATTENTION": "trt_flash",
    "TRT_CROSS_ATTENTION": "trt_cross",
    "TRT_CAUSAL_ATTENTION": "trt_causal",
    "DECODER_ATTENTION": "decoder",
}
#: Provider option to the policy key it realises.
_KEYS = {
    "use_tf32": "execution.tf32",
    "prefer_nhwc": "execution.layout",
    "cudnn_conv_algo_search": "kernels.conv",
    "gpu_mem_limit": "execution.memory.limit",
}


def read_back(
    session: Any, settings: OnnxRuntimeSettings, shapes: Mapping[str, tuple[int | str, ...]] | None = None
) -> dict[str, str]:
    """Return policy key to ``option=value`` as the open session holds it, where it can be read.

    `shapes` are those that the policy states.
    """
    options = session.get_provider_options().get(settings.provider, {})
    in_effect = {key: f"{name}={options[name]}" for name, key in _KEYS.items() if name in options}
    for name in settings.options:
        if name in options and name not in _KEYS:
            in_effect[f"execution.provider_options.onnxruntime.{name}"] = str(options[name])
    for name, value in settings.session.items():
        try:
            in_effect[f"execution.provider_options.onnxruntime.{name}"] = str(
                session.get_session_options().get_session_config_entry(name)
            )
        except Exception:  # an entry that was never set raises; then it was not taken
            in_effect[f"execution.provider_options.onnxruntime.{name}"] = f"not set (asked {value})"
    held = session.get_session_options()
    if settings.inter_threads is not None:
        side_by_side = held.execution_mode.name == "ORT_PARALLEL"
        in_effect[f"execution.provider_options.onnxruntime.{INTER_THREADS}"] = (
            str(held.inter_op_num_threads) if side_by_side else f"{held.inter_op_num_threads}, and sequential"
        )
    if settings.operator_libraries:
        mapped = {os.path.realpath(path) for path in mapped_paths()}
        files = [operator_library(stated) for stated in settings.operator_libraries]
        lost = [
            stated
            for stated, path in zip(settings.operator_libraries, files, strict=True)
            if path is None or os.path.realpath(path) not in mapped
        ]
        in_effect[f"execution.provider_options.onnxruntime.{OPERATOR_LIBRARIES}"] = (
            f"not loaded: {', '.join(lost)}" if lost else ",".join(settings.operator_libraries)
        )
    threads = held.intra_op_num_threads
    if threads:
        in_effect["execution.threads"] = f"intra_op_num_threads={threads}"
    seen = {tensor.name: tensor.shape for tensor in session.get_inputs() if isinstance(tensor.shape, list)}
    in_effect.update(read_shapes(shapes or {}, seen))
    head = "execution.provider_options."
    for key in [key for key in in_effect if key.startswith(head)]:
        for alias in NAMES[1:]:
            in_effect[f"{head}{alias}.{key.removeprefix(f'{head}{NAMES[0]}.')}"] = in_effect[key]
    return in_effect


class _Kernels:
    """Captures the lines ONNX Runtime prints about attention kernels while the block runs."""

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._file: Any = None
        self._saved = -1
        self._before: str | None = None
        self.seen: dict[str, str] = {}

    def __enter__(self) -> _Kernels:
        if self._active:
            import tempfile

            self._before = os.environ.get(_DEBUG)
            os.environ[_DEBUG] = "1"
            self._file = tempfile.TemporaryFile()
            sys.stdout.flush()
            self._saved = os.dup(1)
            os.dup2(self._file.fileno(), 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        sys.stdout.flush()
        os.dup2(self._saved, 1)
        os.close(self._saved)
        if self._before is None:
            os.environ.pop(_DEBUG, None)
        else:
            os.environ[_DEBUG] = self._before
        self._file.seek(0)
        text = self._file.read().decode(errors="replace")
        self._file.close()
        for match in re.finditer(_LINE, text):
            self.seen[match["node"]] = match["kernel"]
        others = "".join(line for line in text.splitlines(keepends=True) if not re.search(_OURS, line))
        if others:
            os.write(1, others.encode())

    def attach(self, observed: Observed, effective: dict[str, str]) -> Observed:
        """Return `observed` with the kernels seen, and with `effective` under what was observed from the units."""
        units = tuple(
            msgspec.structs.replace(
                unit, kernel=_FAMILY.get(self.seen[unit.id], self.seen[unit.id].lower()), kernel_source="reported"
            )
            if unit.id in self.seen
            else unit
            for unit in observed.units
        )
        merged = {**effective, **observed.effective}
        if self.seen:
            families = sorted({_FAMILY.get(kernel, kernel.lower()) for kernel in self.seen.values()})
            merged["kernels.attention"] = ", ".join(families)
        return msgspec.structs.replace(observed, units=units, effective=merged)


def attention_kernels(request: Request) -> _Kernels:
    """Return a context manager that catches which attention kernels run; idle where there are none to catch.

    ONNX Runtime prints them to standard output; what others print meanwhile is passed on when the block ends.
    """
    cuda = request.device.startswith("cuda")
    present = any(op.rpartition(":")[2] in _OPS for op in request.model.ops)
    return _Kernels(active=cuda and present)
