# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Dependencies of an engine and its kernels: libraries that run a model, environment variables, and packages."""

from __future__ import annotations

import fnmatch
import functools
import mmap
import operator
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from xpuruntime.errors import InputError
from xpuruntime.ops.torch_kernels import environment_of
from xpuruntime.runtime.libraries.loading import library_identity
from xpuruntime.runtime.libraries.search import dynamic_symbols

#: Name of the validator of the core's own kernels.
CORE = "xpuruntime._core"

_CUDA = (
    "libcuda.so*", "libcublas.so*", "libcublasLt.so*", "libcudnn*.so*", "libcufft.so*", "libcurand.so*",
    "libcusolver*.so*", "libcusparse*.so*", "libnvrtc.so*", "libnvJitLink.so*",
)  # fmt: skip

_GENAI = ("libonnxruntime-genai*.so*",)
#: Engine to the names of the libraries that compute: what merely reads other formats is left out, such as the reader
#: of compiled graphs of QNN, which a process maps once it has compiled or opened any.
_LIBRARIES: dict[str, tuple[str, ...]] = {
    "onnxruntime": (
        "onnxruntime_pybind11_state*", "libonnxruntime.so*", "libonnxruntime_providers_cuda.so*",
        "libonnxruntime_providers_rocm.so*", "libmigraphx*.so*",
    ),
    "onnxruntime-genai": (*_GENAI, "libonnxruntime.so*", "libonnxruntime_providers_cuda.so*"),
    "openvino": ("libopenvino.so*", "libopenvino_intel_*_plugin.so*", "libopenvino_onnx_frontend.so*", "libtbb.so*"),
    "openvino-genai": (
        "libopenvino_genai*.so*", "libopenvino.so*", "libopenvino_intel_cpu_plugin.so*", "libopenvino_tokenizers.so*",
        "libtbb.so*",
    ),
    "qnn": (
        "onnxruntime_pybind11_state*", "libonnxruntime_providers_qnn.so*", "libQnnHtp.so*", "libQnnHtpPrepare.so*",
        "libHtpPrepare.so*", "libQnnCpu.so*", "libQnnGpu.so*", "libQnnIr.so*",
    ),
    "tensorrt": ("libnvinfer.so*", "libnvinfer_plugin.so*", "libnvonnxparser.so*", "libtensorrt_rtx.so*"),
    "torch": (
        "libtorch.so*", "libtorch_cpu.so*", "libtorch_cuda*.so*", "libtorch_python.so*", "libc10*.so*", "libmkl*.so*",
        "libopenblas*.so*", "libblas.so*", "libcblas.so*", "libgomp*.so*", "libomp*.so*", "libiomp*.so*",
    ),
}  # fmt: skip

#: Libraries that compute on one kind of device alone; a process that looked for devices has mapped others too.
_OF_DEVICES = {
    "libonnxruntime_providers_cuda.so*": "cuda", "libonnxruntime_providers_rocm.so*": "rocm",
    "libmigraphx*.so*": "rocm", "libopenvino_intel_gpu_plugin.so*": "gpu",
    "libopenvino_intel_npu_plugin.so*": "npu",
}  # fmt: skip

#: Of variables that every process reads; where `LD_LIBRARY_PATH` leads is compared by build of the libraries, and of
#: `LD_PRELOAD` those count that replace what an engine calls.
_TUNABLES = "GLIBC_TUNABLES"
_COMMON = (_TUNABLES, "torch.set_flush_denormal")
_GPU = ("CUDA_*", "NVIDIA_TF32_OVERRIDE", "CUBLAS_*", "CUBLASLT_*", "CUDNN_*")
_OPENMP = ("OMP_*", "GOMP_*", "KMP_*")
#: Of those that only a pattern with a star finds, files of the engine are asked whether they read them.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("ORT_*", "ONNX_*", "ONNXRUNTIME_*", "MLAS_*"),
    "onnxruntime-genai": ("ORTGENAI_*", "ORT_*", "ONNX_*", "ONNXRUNTIME_*", "MLAS_*"),
    "openvino": ("OV_*", "OPENVINO_*", "ONEDNN_*", "DNNL_*", "TBB_*"),
    "openvino-genai": ("OV_*", "OPENVINO_*", "ONEDNN_*", "DNNL_*", "TBB_*"),
    "qnn": ("QNN_*", "ORT_*", "ADSP_LIBRARY_PATH"),
    "tensorrt": ("TRT_*", "TENSORRT_*"),
    "torch": (
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", *_OPENMP, "TORCH_*", "PYTORCH_*", "ATEN_*", "MKL_*", "OPENBLAS_*",
        "ONEDNN_*", "DNNL_*", "TORCHDYNAMO_*", "XPURUNTIME_TORCH_FAST_PATH", "torch.*",
    ),
}  # fmt: skip


_COMPILER_MODULES = ("torch._inductor.config", "torch._functorch.config")


class _Setting(NamedTuple):
    """What code may change of an engine in a process: the values that change nothing, and how it is read."""

    usual: tuple[Any, ...] = (True,)
    #: What reads it, where its name is a function that sets it. Whether numbers near zero become zero is read by none:
    #: the processor is seen to do it.
    getter: str = ""
    #: Keys of a policy that set it.
    keys: tuple[str, ...] = ()
    device: str = ""
    #: What says whether a process has it at all.
    where: str = ""


#: The count of threads, which a process that has not imported PyTorch cannot tell.
_THREADS = "torch.set_num_threads"
_DENORMALS = "torch.set_flush_denormal"
_PRECISION = ("execution.tf32", "execution.precision")
_ATTENTION = ("kernels.attention",)
_SDPA = {"flash": "", "mem_efficient": "cuda", "math": "", "cudnn": "cuda"}
_MATMUL = "torch.backends.cuda.matmul"
_QUANTIZED = ("x86",) if platform.machine() in ("x86_64", "AMD64") else ("qnnpack", "none")
#: Engine to settings that code may change in a process; those of the processor hold for every engine on a CPU.
_SETTINGS: dict[str, dict[str, _Setting]] = {
    "": {_DENORMALS: _Setting((False,), device="cpu")},
    "torch": {
        "torch.backends.mkldnn.enabled": _Setting(device="cpu"),
        "torch.backends.mkldnn.deterministic": _Setting((False,), device="cpu"),
        **{
            f"torch.backends.mkldnn.{op}.fp32_precision": _Setting(("none", "ieee"), device="cpu")
            for op in ("matmul", "conv", "rnn")
        },
        "torch.backends.nnpack.set_flags": _Setting(getter="torch._C._get_nnpack_enabled", device="cpu"),
        "torch.backends.quantized.engine": _Setting(_QUANTIZED, device="cpu"),
        "torch.backends.opt_einsum.enabled": _Setting(where="torch.backends.opt_einsum.is_available"),
        "torch.backends.opt_einsum.strategy": _Setting(("auto", None)),
        "torch.backends.mha.set_fastpath_enabled": _Setting(
            getter="torch.backends.mha.get_fastpath_enabled", keys=_ATTENTION
        ),
        **{
            f"torch.backends.cuda.enable_{name}_sdp": _Setting(
                getter=f"torch.backends.cuda.{name}_sdp_enabled", keys=_ATTENTION, device=device
            )
            for name, device in _SDPA.items()
        },
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": _Setting(
            (False,), "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed"
        ),
        "torch.backends.cudnn.enabled": _Setting(device="cuda"),
        "torch.backends.cudnn.deterministic": _Setting((False,), device="cuda"),
        "torch.backends.cudnn.benchmark": _Setting((False,), keys=("execution.determinism",), device="cuda"),
        "torch.backends.cudnn.conv.fp32_precision": _Setting(("tf32",), keys=_PRECISION, device="cuda"),
        "torch.backends.cudnn.rnn.fp32_precision": _Setting(("tf32",), keys=_PRECISION, device="cuda"),
        f"{_MATMUL}.fp32_precision": _Setting(("none", "ieee"), keys=_PRECISION, device="cuda"),
        f"{_MATMUL}.allow_fp16_reduced_precision_reduction": _Setting(keys=_PRECISION, device="cuda"),
        f"{_MATMUL}.allow_bf16_reduced_precision_reduction": _Setting(keys=_PRECISION, device="cuda"),
        f"{_MATMUL}.allow_fp16_accumulation": _Setting((False,), keys=_PRECISION, device="cuda"),
        "torch.use_deterministic_algorithms": _Setting(
            (False,), "torch.are_deterministic_algorithms_enabled", ("execution.determinism",)
        ),
        "torch.set_default_dtype": _Setting(("torch.float32",), "torch.get_default_dtype"),
        _THREADS: _Setting((), "torch.get_num_threads", ("execution.threads",), "cpu"),
    },
}
#: Engine to what is read beside these where code of a model is compiled.
_COMPILED_VARIABLES: dict[str, tuple[str, ...]] = {
    "torch": ("TORCHINDUCTOR_*", "TRITON_*", "CUTEDSL_*", "CUTLASS_*", "ENABLE_*TMA_*"),
}
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
#: What says the validator of the device, which devices CUDA shows and in what order, and where files and libraries are:
#: ONNX Runtime GenAI itself sets `ORT_LIB_PATH` when it is imported. Versions, which images of containers state, are
#: those of libraries. What is printed, built, loaded or sent to other processes computes nothing either, nor does what
#: lets a process have two copies of OpenMP, which scikit-learn sets when it is imported.
_ELSEWHERE = (
    "ORT_LIB_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_PATH", "CUDA_CACHE_PATH",
    "*_HOME", "*_ROOT", "*_VERSION", "*_LIB_PATHS", "*_CACHE_DIR", "*_EXTENSIONS_DIR", "PYTORCH_KERNEL_CACHE_PATH",
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "KMP_SETTINGS", "KMP_WARNINGS", "OMP_DISPLAY_*",
    "*_VERBOSE*", "*_LOG_LEVEL", "*_VLOG_LEVEL", "*_LOGLEVEL*", "*_LOGINFO*", "*_LOGDEST*", "*_JIT_DUMP",
    "*_JIT_PROFILE", "TORCH_SHOW_*", "TORCH_LOGS*", "TORCH_TRACE", "TORCH_COMPILE_DEBUG*", "TORCH_NCCL_*",
    "TORCH_DISTRIBUTED_*", "TORCH_FR_*", "TORCH_FORCE_*WEIGHTS_ONLY_LOAD", "TORCH_CUDA_ARCH_LIST", "PYTORCH_BUILD_*",
    "PYTORCH_TEST_*", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS", "ONNX_ML", "ONNX_NAMESPACE",
    "ONNX_BUILD_*", "*_PRIMITIVE_CACHE_CAPACITY", "OV_VISUALIZE_*", "OV_ENABLE_*", "ORTGENAI_LOG_*",
    "OPENVINO_TRACE_DEPTH", "TBB_MALLOC_*", "*_STACKSIZE", "GOMP_DEBUG", "OMP_AFFINITY_FORMAT", "OMP_TARGET_OFFLOAD",
    "OMP_DEFAULT_DEVICE", "MKL_PROGRESS*", "MKL_MPI_PPN", "ORT_DISABLE_TELEMETRY", "ORT_DEBUG_NODE_IO_*",
    "PYTORCH_FUSION_DEBUG", "PYTORCH_API_USAGE_STDERR", "PYTORCH_JIT_STATS", "PYTORCH_JIT_TIME", "PYTORCH_KEEP_TMPDIR",
    "PYTORCH_ROCM_ARCH", "TORCH_XPU_ARCH_LIST", "TORCH_*ADDR2LINE*", "TORCH_SYMBOLIZE_MODE", "TORCH_INCLUDE_*",
    "TORCH_AUTOGRAD_SHUTDOWN_*", "TORCH_DISABLE_DEADLOCK_DETECTION", "TORCH_CUSTOM_TERMINATE", "TORCH_GLOO_*",
    "TORCH_PROFILER_*", "TORCH_ELASTIC_*", "TORCH_SERIALIZATION_DEBUG", "TORCH_MODEL_ZOO", "TORCH_HUB",
    "TORCH_COMPILE_CPROFILE", "TORCHDYNAMO_EXTENDED_*", "TORCHDYNAMO_PRINT_*",
)  # fmt: skip

#: What only engines on a CUDA device read.
_OF_CUDA = (
    "*_CUDA_*", "*_CUDNN_*", "*_CUBLAS*", "*_CUDAGRAPH_*", "*_MIOPEN_*", "*_ROCM_*", "*_HIP*", "ORT_TENSORRT_*",
    "TORCH_BLAS_PREFER_*", "TORCH_LINALG_PREFER_*", "PYTORCH_ALLOC_CONF",
    "TRITON_*", "CUTEDSL_*", "CUTLASS_*", "ENABLE_*TMA_*"
)  # fmt: skip

#: The BLAS that xpuruntime's kernels for the CPU call, and what a plugin's kernels may compute by: NumPy's, and OpenMP.
_OWN_BLAS = ("libscipy_openblas.so*", "libscipy_openblas.dylib")
_PLUGIN = ("libscipy_openblas*", "libopenblas*", "libmkl*", "libblas*", "libgomp*", "libomp*", "libiomp*")
#: Prefixes of kernels that the core itself brings.
OWN_KERNELS = ("cpu.", "cuda_raw.", "cublas.", "cudnn.", "null.")
#: Prefixes of kernels that an engine brings, with its libraries.
_ENGINE_KERNELS = ("torch.",)
#: Prefix of a kernel of the core to the libraries that it is of.
_OF_KERNELS = {
    "cublas.": ("libcublas*",), "cudnn.": ("libcudnn*",), "cpu.blas": _OWN_BLAS, "cpu.gemm_conv": _OWN_BLAS,
}  # fmt: skip
#: Of the BLAS they set the number of threads themselves.
_KERNEL_VARIABLES = {
    "cpu.": ("XPURUNTIME_CPU_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_BLOCK_FACTOR", "OPENBLAS_L2_SIZE"),
}

#: Engine to the distributions that bring it, the first that is installed counts.
_PACKAGES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-directml", "onnxruntime"),
    "onnxruntime-genai": ("onnxruntime-genai", "onnxruntime-genai-cuda"),
    "openvino": ("openvino",),
    "openvino-genai": ("openvino-genai",),
    "qnn": ("onnxruntime-qnn",),
    "tensorrt": ("tensorrt-rtx", "tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    "torch": ("torch",),
}


#: Variables to the texts that change nothing. ``TORCH_USE_RTLD_GLOBAL=0`` does: PyTorch takes any text for a yes.
_USUAL = {
    "PYTORCH_JIT": ("1",),
    "TORCHDYNAMO_DISABLE": ("", "0"),
    "TORCH_COMPILE_DISABLE": ("", "0"),
    "TORCH_USE_RTLD_GLOBAL": ("",),
}


_BUILD = re.compile(r" [0-9a-f]{16,}")


def libraries_of(engine: str, device: str, mapped: Mapping[str, str], kernels: Collection[str] = ()) -> dict[str, str]:
    """Return those mapped libraries, file name to path, that compute what an engine and kernels run on a device."""
    patterns = _LIBRARIES.get(engine, ()) + (_CUDA if device.startswith("cuda") else ())
    others = tuple(name for name, kind in _OF_DEVICES.items() if kind != device.partition(":")[0])
    if engine == "onnxruntime" and any(_matches(name, _GENAI) for name in mapped):  # which has mapped it for itself
        others += ("libonnxruntime.so*",)
    return {
        name: path
        for name, path in mapped.items()
        if (_matches(name, patterns) and not _matches(name, others) and not _is_vendored(path, engine))
        or any(of_kernel(name, kernel) for kernel in kernels)
    }


def _is_vendored(path: str, engine: str) -> bool:
    """Whether a wheel of another package has brought a library for itself, under a name that nothing else loads."""
    folder = os.path.basename(os.path.dirname(path))  # noqa: PTH119, PTH120 - many paths on the way to a lock
    own = {name.replace("-", "_") for name in _PACKAGES.get(engine, ())}
    return folder.endswith(".libs") and folder.removesuffix(".libs") not in own


def of_kernel(library: str, kernel: str) -> bool:
    """Whether a kernel of the core or of a plugin computes by a library, beside those of the engine."""
    if is_plugin(kernel):
        return _matches(library, _PLUGIN)
    return any(_matches(library, names) for prefix, names in _OF_KERNELS.items() if kernel.startswith(prefix))


def is_plugin(kernel: str) -> bool:
    """Whether a kernel is of another package."""
    return not kernel.startswith((*OWN_KERNELS, *_ENGINE_KERNELS))


def variables_of(
    engine: str, device: str, environment: Mapping[str, str], kernels: Collection[str] = (), *, compiled: bool = False
) -> dict[str, str]:
    """Return those environment variables that are set and that an engine, its libraries or kernels read; no secrets."""
    asked = _VARIABLES.get(engine, ()) + (_COMPILED_VARIABLES.get(engine, ()) if compiled else ())
    patterns = _COMMON + (_GPU if device.startswith("cuda") else ())
    for prefix, names in _KERNEL_VARIABLES.items():
        patterns += names if any(kernel.startswith(prefix) for kernel in kernels) else ()
    for kernel in kernels:
        patterns += environment_of(kernel)
    if any(map(is_plugin, kernels)):
        patterns += (*_OPENMP, "OPENBLAS_*", "MKL_*")
    idle = _ELSEWHERE + (() if device.startswith("cuda") else _OF_CUDA)
    variables = {
        name: environment[name]
        for name in sorted(environment)
        if (_matches(name, patterns) or _matches(name, asked))
        and not _matches(name, idle)
        and not any(word in name for word in _SECRET)
        and environment[name] not in _USUAL.get(name, ())
        and (_matches(name, patterns) or name in asked or "." in name or is_read(name, engine))
    }
    if _BUILD.search(environment.get(PRELOAD, "")):  # as `preloaded_libraries` names them
        variables[PRELOAD] = environment[PRELOAD]
    if _TUNABLES in variables:  # those of the allocator and of threads compute nothing
        parts = [part for part in variables.pop(_TUNABLES).split(":") if part.startswith("glibc.cpu.")]
        variables |= {_TUNABLES: ":".join(parts)} if parts else {}
    return variables


def preloaded_libraries(
    engine: str, device: str, environment: Mapping[str, str], mapped: Mapping[str, str], kernels: Collection[str]
) -> dict[str, str]:
    """Return ``LD_PRELOAD`` with those libraries of it, by build, that replace what an engine or kernels call."""
    if not environment.get(PRELOAD):
        return {}
    computing = libraries_of(engine, device, {**package_libraries(engine), **mapped}, kernels)
    return {PRELOAD: preloaded(environment, mapped, tuple(computing.values()))}


def settings_of(engine: str, device: str, stated: Mapping[str, str], *, compiled: bool = False) -> dict[str, str]:
    """Return what code of this process has set, name to value, but what the keys of a policy, those `stated`, set.

    A process that has not imported the engine has set nothing of it. Settings of a compiler count for what is
    `compiled`.
    """
    settings = {name: _text(value) for name, value, _ in _compiler_settings()} if compiled and engine == "torch" else {}
    rules = [text for key, text in stated.items() if key.startswith("kernels.rules[")]
    keys = {*stated, *(_ATTENTION if any('"op"' not in text or '"attention"' in text for text in rules) else ())}
    for name, setting in {**_SETTINGS[""], **_SETTINGS.get(engine, {})}.items():
        if setting.device not in ("", device.partition(":")[0]) or keys.intersection(setting.keys):
            continue
        value = str(sys.float_info.min / 2 == 0.0) if name == _DENORMALS else _read(setting.getter or name)
        if value in (None, *map(str, setting.usual)) or (setting.where and _read(setting.where) != "True"):
            continue
        settings[name] = str(value)
    return settings


def _compiler_settings() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of what code has set of PyTorch's compiler and is a part of its own cache's key."""
    for module in _COMPILER_MODULES:
        config = sys.modules.get(module)
        ignored = ("_", *getattr(config, "_cache_config_ignore_prefix", ()))
        for name, entry in getattr(config, "_config", {}).items():
            if name.startswith(ignored) or config._is_default(name):  # type: ignore[union-attr]
                continue
            value = operator.attrgetter(name)(config)
            if value != entry.default:
                yield f"{module}.{name}", value, entry.default


def _text(value: Any) -> str:
    return str(getattr(value, "__qualname__", value))  # the text of a function has an address


def _read(name: str) -> str | None:
    module, _, path = name.partition(".")
    try:
        value = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return str(value() if callable(value) else value)


def setting_text(name: str, value: str | None) -> str:
    """Return the code that sets what `settings_of` names to a value; ``None``: to the usual one."""
    known = next((settings[name] for settings in _SETTINGS.values() if name in settings), None)
    defaults = {setting: default for setting, _, default in _compiler_settings()}
    setting = known or _Setting((defaults[name],) if name in defaults else ())
    text = str(setting.usual[0]) if value is None and setting.usual else str(value)
    text = text if text in ("True", "False", "None") or text.isdecimal() or "." in text else repr(text)
    return f"call {name}({text})" if setting.getter or name == _DENORMALS else f"set {name} = {text}"


def with_thread_counts(expected: dict[str, str], observed: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return variables and settings without a count of threads that only one of both has."""
    if _THREADS not in expected or _THREADS not in observed:
        expected, observed = dict(expected), dict(observed)
        for at in (expected, observed):
            at.pop(_THREADS, None)
    return expected, observed


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def packages_of(engine: str) -> tuple[str, ...]:
    """Return the distributions that may bring an engine."""
    return _PACKAGES.get(engine, ())


def quantizer_packages(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the distributions that quantize a model when it is loaded, and what they compute with."""
    style = settings.get("qdq") or (settings.get("style") if settings.get("quantize") else None)
    if not style:
        return ()
    return (*(("nncf", "openvino") if style == "openvino-nncf" else _PACKAGES["onnxruntime"]), "onnx", "numpy")


def compilers_of(settings: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """Return the variables that name the compilers which make code of a model when it is loaded."""
    if settings.get("mode") != "compile":
        return ()
    return ("CC",) if device.startswith("cuda") else ("CXX",)


def compiler_packages(settings: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """Return the distributions that make code of a model for a device, beside that of the engine."""
    return ("triton", "pytorch-triton") if compilers_of(settings, device) and device.startswith("cuda") else ()


PRELOAD = "LD_PRELOAD"
#: Engine to the packages that hold its files.
_FOLDERS = {
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-genai": ("onnxruntime_genai", "onnxruntime"),
    "openvino": ("openvino",),
    "openvino-genai": ("openvino_genai", "openvino", "openvino_tokenizers"),
    "qnn": ("onnxruntime_qnn", "onnxruntime"),
    "tensorrt": ("tensorrt_libs", "tensorrt_rtx_libs", "tensorrt", "tensorrt_rtx"),
    "torch": ("torch",),
}
#: What reads a variable whose name begins so; of others every file of the engine may.
_READERS = {
    "OMP": r"lib(gomp|omp|iomp)", "GOMP": r"lib(gomp|omp|iomp)", "KMP": r"lib(gomp|omp|iomp)",
    "OPENBLAS": r"lib(scipy_)?openblas", "MKL": r"lib(mkl|torch_cpu)", "TBB": r"libtbb",
    "ONEDNN": r"lib(dnnl|torch_cpu|openvino_intel)", "DNNL": r"lib(dnnl|torch_cpu|openvino_intel)",
}  # fmt: skip
#: Whose names are put together in a process: a reader holds what follows the first underscore.
_PREFIXED = ("ONEDNN", "DNNL")
#: What goes on with a name.
_WORD = frozenset(bytes([byte]) for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_LIBRARY = re.compile(r"\.(so|dylib|pyd|dll)\b", re.IGNORECASE)
#: Libraries of C, whose functions allocate, wait and read files, and prefixes of the same of C++, with what its
#: compilers generate in each library.
_C = ("libc.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")
_GENERATED = (
    b"_Zn", b"_Zd", b"_ZNSt", b"_ZNKSt", b"_ZSt", b"_ZTISt", b"_ZTSSt", b"_ZTVSt", b"__cxa_", b"_init", b"_fini",
    b"_edata", b"_end", b"__bss_start",
)  # fmt: skip


@functools.cache
def _files(engine: str, search_path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of an engine with code, and the libraries that are in the environment of Python."""
    folders = [str(Path(sys.prefix, "lib"))] if _FOLDERS.get(engine) else []
    files = [str(path) for folder in folders for path in Path(folder).glob("lib*.*") if _LIBRARY.search(path.name)]
    for package in _FOLDERS.get(engine, ()):
        spec = PathFinder.find_spec(package, list(search_path))
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for folder, _, names in (*os.walk(root), *os.walk(f"{root}.libs")):
                files += [os.path.join(folder, name) for name in names if name.endswith(".py") or _LIBRARY.search(name)]  # noqa: PTH118 - thousands
    return tuple(files)


@functools.cache
def is_read(variable: str, engine: str) -> bool:
    """Whether any file of an engine reads an environment variable; yes where the engine has no files here."""
    files = _files(engine, tuple(sys.path))
    prefix, _, rest = variable.partition("_")
    readers = re.compile(_READERS.get(prefix, ""))
    names = [name.encode() for name in ((variable, rest) if prefix in _PREFIXED else (variable,)) if name]
    return not files or any(
        _contains(path, names)
        for path in files
        if readers.match(os.path.basename(path))  # noqa: PTH119 - thousands
    )


def _contains(path: str, names: Iterable[bytes]) -> bool:
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(_has_word(content, name) or (path[-3:] != ".py" and _has_parts(content, name)) for name in names)
    except (OSError, ValueError):  # gone, or empty
        return False


def _has_word(content: mmap.mmap, name: bytes) -> bool:
    at = content.find(name)
    while at >= 0:
        if content[at + len(name) : at + len(name) + 1] not in _WORD:
            return True
        at = content.find(name, at + 1)
    return False


def _has_parts(content: mmap.mmap, name: bytes) -> bool:
    """Whether code may put a name together: compilers copy a text by its first and its last bytes."""
    size = 16 if len(name) > 16 else 8
    return len(name) > size and content.find(name[:size]) >= 0 and content.find(name[-size:]) >= 0


def package_libraries(engine: str) -> dict[str, str]:
    """Return file name to path of the libraries that an engine's packages bring, mapped or not."""
    files = _files(engine, tuple(sys.path))
    return {os.path.basename(path): path for path in files if _LIBRARY.search(path)}  # noqa: PTH119 - texts


def preloaded(environment: Mapping[str, str], mapped: Mapping[str, str], computing: Collection[str]) -> str:
    """Name those libraries of ``LD_PRELOAD`` that replace a function which computing libraries call, with their builds.

    Functions of C and C++ themselves, such as those of an allocator or a clock, compute nothing.
    """
    stated = re.split(r"[: ]+", environment.get(PRELOAD, ""))
    paths = [mapped[name] for name in map(os.path.basename, stated) if name in mapped]
    if not paths:
        return ""
    of_c = {name for library in _C if library in mapped for name in _symbols(mapped[library])}
    called = {name for path in computing for name in _symbols(path)} - of_c
    return ", ".join(_build(path) for path in dict.fromkeys(paths) if any(_replaced(path, called)))


def _replaced(path: str, called: Collection[bytes]) -> Iterator[bytes]:
    for name, defined in _symbols(path).items():
        if defined and name in called and not name.startswith(_GENERATED):
            yield name


def _build(path: str) -> str:
    facts = library_identity(path)
    return f"{facts['soname']} {facts.get('build_id') or facts['sha256']}"


@functools.cache
def _symbols(path: str) -> dict[bytes, bool]:
    try:
        return dynamic_symbols(path)
    except InputError:
        return {}
