# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Entries of a lock: what a report observed, under names that are the same in every load, and what each depends on.

Tables of engines say which libraries run a model, which environment variables change it, and which packages bring it.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from typing import TYPE_CHECKING, Any

from xpuruntime.lockfile.consistency import NOTHING_RAN
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.records import CallEntry, UnitEntry
from xpuruntime.ops.torch_kernels import environment_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.evidence.records import Unit
    from xpuruntime.lockfile.records import Validator

__all__ = [
    "CORE",
    "OWN_KERNELS",
    "call_entries",
    "compiler_packages",
    "compilers_of",
    "is_plugin",
    "libraries_of",
    "of_kernel",
    "packages_of",
    "quantizer_packages",
    "unit_entries",
    "variables_of",
]

#: Name of the validator of the core's own kernels.
CORE = "xpuruntime._core"

_CUDA = (
    "libcuda.so*", "libcublas.so*", "libcublasLt.so*", "libcudnn*.so*", "libcufft.so*", "libcurand.so*",
    "libcusolver*.so*", "libcusparse*.so*", "libnvrtc.so*", "libnvJitLink.so*",
)  # fmt: skip

#: Engine to the names of the libraries that compute: what merely reads other formats is left out, such as the reader
#: of compiled graphs of QNN, which a process maps once it has compiled or opened any.
_LIBRARIES: dict[str, tuple[str, ...]] = {
    "onnxruntime": (
        "onnxruntime_pybind11_state*", "libonnxruntime.so*", "libonnxruntime_providers_cuda.so*",
        "libonnxruntime_providers_rocm.so*", "libmigraphx*.so*",
    ),
    "onnxruntime-genai": ("libonnxruntime-genai*.so*", "libonnxruntime.so*", "libonnxruntime_providers_cuda.so*"),
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

#: Patterns of variables that every process reads; where `LD_LIBRARY_PATH` leads is compared by build of the libraries.
_COMMON = ("LD_PRELOAD",)
_GPU = ("CUDA_*", "NVIDIA_TF32_OVERRIDE", "CUBLAS_*", "CUBLASLT_*", "CUDNN_*")
_OPENMP = ("OMP_*", "GOMP_*", "KMP_*")
_VARIABLES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("ORT_*", "ONNX_*", "ONNXRUNTIME_*", "MLAS_*"),
    "onnxruntime-genai": ("ORTGENAI_*", "ORT_*", "ONNX_*", "ONNXRUNTIME_*", "MLAS_*"),
    "openvino": ("OV_*", "OPENVINO_*", "ONEDNN_*", "DNNL_*", "TBB_*"),
    "openvino-genai": ("OV_*", "OPENVINO_*", "ONEDNN_*", "DNNL_*", "TBB_*"),
    "qnn": ("QNN_*", "ORT_*", "ADSP_LIBRARY_PATH"),
    "tensorrt": ("TRT_*", "TENSORRT_*"),
    "torch": (
        *_OPENMP, "TORCH_*", "PYTORCH_*", "ATEN_*", "MKL_*", "OPENBLAS_*", "ONEDNN_*", "DNNL_*", "TORCHDYNAMO_*",
        "XPURUNTIME_TORCH_*",
    ),
}  # fmt: skip
#: Engine to what is read beside these where code of a model is compiled.
_COMPILED_VARIABLES: dict[str, tuple[str, ...]] = {
    "torch": ("TORCHINDUCTOR_*", "TRITON_*", "CUTEDSL_*", "CUTLASS_*", "ENABLE_*TMA_*"),
}
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
#: What says the validator of the device, which devices CUDA shows and in what order, and where files and libraries are:
#: ONNX Runtime GenAI itself sets `ORT_LIB_PATH` when it is imported.
_ELSEWHERE = (
    "ORT_LIB_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH",
    "TORCH_LOGS*", "TORCH_HOME", "TRITON_HOME", "*_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS",
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


def libraries_of(engine: str, device: str, mapped: Mapping[str, str], kernels: Collection[str] = ()) -> dict[str, str]:
    """Return those mapped libraries, file name to path, that compute what an engine and kernels run on a device."""
    patterns = _LIBRARIES.get(engine, ()) + (_CUDA if device.startswith("cuda") else ())
    others = tuple(name for name, kind in _OF_DEVICES.items() if kind != device.partition(":")[0])
    return {
        name: path
        for name, path in mapped.items()
        if (_matches(name, patterns) and not _matches(name, others))
        or any(of_kernel(name, kernel) for kernel in kernels)
    }


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
    patterns = _COMMON + _VARIABLES.get(engine, ()) + (_GPU if device.startswith("cuda") else ())
    patterns += _COMPILED_VARIABLES.get(engine, ()) if compiled else ()
    for prefix, names in _KERNEL_VARIABLES.items():
        patterns += names if any(kernel.startswith(prefix) for kernel in kernels) else ()
    for kernel in kernels:
        patterns += environment_of(kernel)
    if any(map(is_plugin, kernels)):
        patterns += (*_OPENMP, "OPENBLAS_*", "MKL_*")
    return {
        name: environment[name]
        for name in sorted(environment)
        if _matches(name, patterns) and not _matches(name, _ELSEWHERE) and not any(word in name for word in _SECRET)
    }


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


#: Names of operators on the host, of which the profiler shows the one that took longest: another one in another run.
_OPERATORS = ("aten::",)


def _kernels_by_node(decisions: Iterable[KernelDecision]) -> dict[str, str]:
    """Return source node to the xpuruntime kernels that served it, with configurations, joined by commas."""
    found: dict[str, dict[str, None]] = {}
    for decision in decisions:
        if decision.kernel is not None:
            for node in decision.nodes:
                found.setdefault(node, {})[decision.kernel] = None
    return {node: ", ".join(sorted(kernels)) for node, kernels in found.items()}


def unit_entries(
    units: Sequence[Unit], decisions: Iterable[KernelDecision], validators: Sequence[Validator], at: str
) -> tuple[UnitEntry, ...]:
    """Return one entry for each unit, sorted by name."""
    chosen = _kernels_by_node(decisions)
    ids = _Dependencies(validators)
    names: Counter[str] = Counter()
    entries = []
    for unit in units:
        name = _name(unit)
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        kernel = _kernel(unit, chosen)
        entries.append(
            UnitEntry(
                unit=name,
                op=unit.op,
                relation=unit.relation,
                sources=unit.source_nodes,
                outputs=tuple(sorted(unit.outputs)),
                at=at,
                on=" ".join(part for part in (unit.engine, unit.device, unit.provider) if part),
                kernel=kernel,
                precision=unit.precision_run,
                accumulate=_accumulate(unit),
                layout=unit.layout,
                depends_on=ids.of(kernel),
                known="unobservable" if kernel is None and unit.relation not in NOTHING_RAN else "observed",
            )
        )
    return tuple(sorted(entries, key=lambda entry: (entry.at, entry.unit)))


def _name(unit: Unit) -> str:
    """Return a name made of source nodes and tensors: many engines number their units anew in each load."""
    phase = f"{unit.phase}:" if unit.phase else ""
    if unit.source_nodes:
        return phase + "+".join(unit.source_nodes)
    served = "+".join(unit.serves) or "+".join(sorted(unit.outputs))
    return phase + (f"{unit.op} for {served}" if served else unit.op)


def _kernel(unit: Unit, chosen: Mapping[str, str]) -> str | None:
    for node in unit.source_nodes:
        if node in chosen:
            return chosen[node]
    on_device = sorted({kernel.name for kernel in unit.device_kernels if kernel.kind == "kernel"})
    if on_device:
        return " + ".join(on_device)
    if unit.kernel is None or unit.kernel_source != "reported" or unit.kernel.startswith(_OPERATORS):
        return None
    return unit.kernel


def _accumulate(unit: Unit) -> str | None:
    """Return the precision in which a device's kernels multiply, as far as their names say."""
    precisions = {kernel.precision for kernel in unit.device_kernels if kernel.precision is not None}
    return precisions.pop() if len(precisions) == 1 else None


def call_entries(decisions: Iterable[KernelDecision], validators: Sequence[Validator]) -> tuple[CallEntry, ...]:
    """Return an entry for each node that an xpuruntime kernel served, sorted by node."""
    ids = _Dependencies(validators)
    entries: dict[tuple[str, str], CallEntry] = {}
    for decision in decisions:
        kernel = decision.kernel
        if kernel is None:
            continue
        for node in decision.nodes:
            entry = CallEntry(
                op=decision.op,
                dtype=decision.dtype,
                module=decision.module,
                node=node,
                kernel=kernel,
                depends_on=ids.of(kernel),
            )
            entries.setdefault((node, decision.op), entry)
    return tuple(entries[key] for key in sorted(entries))


class _Dependencies:
    """Which validators an entry depends on."""

    def __init__(self, validators: Sequence[Validator]) -> None:
        self._sources = {
            validator.id: validator.key for validator in validators if validator.kind == ValidatorKind.KERNEL_SOURCE
        }
        self._libraries = {
            validator.id: validator.key for validator in validators if validator.kind == ValidatorKind.LIBRARY
        }
        self._all = tuple(
            validator.id for validator in validators if validator.id not in {**self._sources, **self._libraries}
        )

    def of(self, kernel: str | None) -> tuple[str, ...]:
        """Return the ids for one kernel: of libraries only those that it is of, where that is known."""
        own = kernel is not None and kernel.startswith(OWN_KERNELS)
        brought = CORE if own else (kernel or "").partition(".")[0]
        needed = [id for id, name in self._sources.items() if name == brought]
        needed += [id for id, name in self._libraries.items() if not own or of_kernel(name, str(kernel))]
        return tuple(sorted((*self._all, *needed)))
