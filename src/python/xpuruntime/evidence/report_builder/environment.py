# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Environment that can change a result: Python, platform, packages, environment variables."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.runtime.machine import Machine

__all__ = ["environment_facts", "influential_variables", "machine_facts"]

_PACKAGES = (
    "xpuruntime",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-qnn",
    "openvino",
    "tensorrt-cu13",
    "tensorrt-cu12",
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cublas",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
)
_PREFIXES = (
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "GOMP_",
    "HIP_",
    "KMP_",
    "MKL_",
    "MLAS_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "ONNX",
    "OPENBLAS_",
    "OPENVINO_",
    "ORT_",
    "OV_",
    "PYTORCH_",
    "QNN_",
    "ROCR_",
    "TENSORRT_",
    "TORCH_",
    "TRT_",
    "XPURUNTIME_",
)
_NAMES = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED"})
_PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")


def influential_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that engines and vendor libraries read, sorted; never one that looks secret."""
    source = os.environ if variables is None else variables
    return {
        name: source[name]
        for name in sorted(source)
        if (name.startswith(_PREFIXES) or name in _NAMES) and not any(word in name.upper() for word in _PRIVATE)
    }


def environment_facts() -> dict[str, Any]:
    """Return ``python``, ``platform``, ``machine``, ``packages``, ``variables``. None of the packages is imported."""
    from importlib import metadata

    packages: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": packages,
        "variables": influential_variables(),
    }


def machine_facts(machine: Machine) -> dict[str, Any]:
    """Return ``cpu``, and where there are NVIDIA devices ``driver`` and ``devices``."""
    found: dict[str, Any] = {"cpu": f"{machine.cpu.name}, {machine.cpu.cores} cores"}
    if machine.cuda:
        found["driver"] = "CUDA " + _version(machine.cuda[0].driver_version)
        found["devices"] = {
            f"cuda:{one.index}": f"{one.name}, sm{_version(one.compute_capability).replace('.', '')}, "
            f"{one.total_memory} bytes"
            for one in machine.cuda
        }
    return found


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
