# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tables of engines: libraries that run a model, environment variables that change it, packages that bring it."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["libraries_of", "packages_of", "variables_of"]

_CUDA = (
    "libcuda.so*", "libcublas.so*", "libcublasLt.so*", "libcudnn*.so*", "libcufft.so*", "libcurand.so*",
    "libcusolver*.so*", "libcusparse*.so*", "libnvrtc.so*", "libnvJitLink.so*",
)  # fmt: skip

#: Engine to the names of the libraries that compute: what merely reads other formats is left out.
_LIBRARIES: dict[str, tuple[str, ...]] = {
    "onnxruntime": (
        "onnxruntime_pybind11_state*", "libonnxruntime.so*", "libonnxruntime_providers_cuda.so*",
        "libonnxruntime_providers_rocm.so*", "libmigraphx*.so*",
    ),
    "openvino": ("libopenvino.so*", "libopenvino_intel_*_plugin.so*", "libopenvino_onnx_frontend.so*", "libtbb.so*"),
    "qnn": (
        "onnxruntime_pybind11_state*", "libonnxruntime_providers_qnn.so*", "libQnnHtp.so*", "libQnnHtpPrepare.so*",
        "libHtpPrepare.so*", "libQnnSystem.so*", "libQnnCpu.so*", "libQnnGpu.so*", "libQnnIr.so*",
    ),
    "tensorrt": ("libnvinfer.so*", "libnvinfer_plugin.so*", "libnvonnxparser.so*", "libtensorrt_rtx.so*"),
    "torch": (
        "libtorch.so*", "libtorch_cpu.so*", "libtorch_cuda*.so*", "libtorch_python.so*", "libc10*.so*", "libmkl*.so*",
        "libgomp*.so*", "libomp*.so*",
    ),
}  # fmt: skip

#: Patterns of variables that every engine's libraries read.
_COMMON = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_*", "GOMP_*", "KMP_*", "XPURUNTIME_CPU_THREADS")
_GPU = ("CUDA_*", "NVIDIA_TF32_OVERRIDE", "CUBLAS_*", "CUBLASLT_*", "CUDNN_*")
_VARIABLES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("ORT_*", "ONNX_*", "ONNXRUNTIME_*", "MLAS_*"),
    "openvino": ("OV_*", "OPENVINO_*", "ONEDNN_*", "DNNL_*", "TBB_*"),
    "qnn": ("QNN_*", "ORT_*", "ADSP_LIBRARY_PATH"),
    "tensorrt": ("TRT_*", "TENSORRT_*"),
    "torch": ("TORCH_*", "PYTORCH_*", "ATEN_*", "MKL_*", "ONEDNN_*", "DNNL_*", "TRITON_*", "XPURUNTIME_TORCH_*"),
}
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
#: Which devices CUDA shows, and in what order, says the validator of the device.
_ELSEWHERE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "TORCH_LOGS")

#: Engine to the distributions that bring it, the first that is installed counts.
_PACKAGES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-directml", "onnxruntime"),
    "openvino": ("openvino",),
    "qnn": ("onnxruntime-qnn",),
    "tensorrt": ("tensorrt-rtx", "tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    "torch": ("torch",),
}


def libraries_of(engine: str, device: str, mapped: Mapping[str, str]) -> dict[str, str]:
    """Return those mapped libraries, file name to path, that compute what an engine runs on a device."""
    patterns = _LIBRARIES.get(engine, ()) + (_CUDA if device.startswith("cuda") else ())
    return {name: path for name, path in mapped.items() if any(fnmatch.fnmatchcase(name, one) for one in patterns)}


def variables_of(engine: str, device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return those environment variables that are set and that an engine or its libraries read; no secrets."""
    patterns = _COMMON + _VARIABLES.get(engine, ()) + (_GPU if device.startswith("cuda") else ())
    return {
        name: environment[name]
        for name in sorted(environment)
        if name not in _ELSEWHERE
        and not any(word in name for word in _SECRET)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def packages_of(engine: str) -> tuple[str, ...]:
    """Return the distributions that may bring an engine."""
    return _PACKAGES.get(engine, ())
