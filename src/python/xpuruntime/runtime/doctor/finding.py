# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Finding`: one thing `doctor` has to say, with the code of its kind."""

from __future__ import annotations

from typing import Literal

import msgspec

from xpuruntime.codes import Code

__all__ = ["Finding", "FindingCode"]


class FindingCode(Code):
    """What `doctor` found."""

    ORT_CLASH = "ort_clash", "Two ONNX Runtime wheels are installed over each other."
    QNN_PULLED_ONNXRUNTIME = "qnn_pulled_onnxruntime", "The QNN plug-in brought the wheel onnxruntime with it."
    QNN_ORT_TOO_OLD = "qnn_ort_too_old", "The QNN plug-in sits on an ONNX Runtime that is too old for it."
    ORT_OVERWRITTEN = (
        "ort_overwritten",
        "The files of ONNX Runtime on disk are not those of the recorded wheel.",
    )
    ORT_FILES_MISSING = "ort_files_missing", "Files of the recorded ONNX Runtime wheel are missing."
    ORT_MISSING = "ort_missing", "ONNX Runtime is not installed."
    ORT_CPU_ONLY = "ort_cpu_only", "The wheel has no CUDA provider, and the machine has an NVIDIA device."
    PACKAGE_OUT_OF_RANGE = "package_out_of_range", "A Python package has a version that xpuruntime is not made for."
    PACKAGE_MISSING = "package_missing", "A Python package that xpuruntime needs is not installed."
    PACKAGE_TWICE = "package_twice", "A Python package is installed more than once."
    CORE_MISSING = "core_missing", "The core module does not import."
    CORE_WITHOUT_CUDA = "core_without_cuda", "The core module was built without CUDA."
    CORE_WITHOUT_BACKEND = "core_without_backend", "The core module was built without the kernels of cuBLAS or cuDNN."
    CORE_WITHOUT_CUPTI = "core_without_cupti", "The core module was built without what traces the work of devices."
    NO_NVIDIA_DEVICE = "no_nvidia_device", "The machine has no NVIDIA device."
    DRIVER_MISSING = "driver_missing", "The NVIDIA driver is not installed."
    DRIVER_NOT_LOADED = "driver_not_loaded", "The NVIDIA driver is installed and not loaded."
    DRIVER_MISMATCH = "driver_mismatch", "The NVIDIA driver's library and kernel module have different versions."
    DRIVER_TOO_OLD = "driver_too_old", "The NVIDIA driver is too old for the CUDA version in use."
    DEVICES_HIDDEN = "devices_hidden", "CUDA_VISIBLE_DEVICES hides every device."
    LIBRARY_MISSING = "library_missing", "A library that the CUDA provider needs is not there."
    CUDA_MAJOR_MISMATCH = "cuda_major_mismatch", "A library is there only for another CUDA version."
    LIBRARY_SHADOWED = (
        "library_shadowed",
        "There is more than one version of a library; the first one is used.",
    )
    LIBRARY_PATH_SHADOWS_WHEEL = "library_path_shadows_wheel", "LD_LIBRARY_PATH has another version than a wheel has."
    LIBRARY_LOADED_TWICE = "library_loaded_twice", "Two versions of a library are loaded in this process."
    ENGINE_BROKEN = "engine_broken", "An engine is installed and cannot be loaded."
    NO_DEVICE = "no_device", "A provider of an engine has no device here that it can use, which is no problem."
    PROVIDER_BROKEN = "provider_broken", "A provider of an engine is installed and cannot be loaded."
    PLUGIN_FAILED = "plugin_failed", "A plugin for engines or kernels failed to load; all else goes on."
    TORCH_FAST_PATH = "torch_fast_path", "Policies could reach PyTorch's operators at less cost, by the addon."
    KERNEL_ADVISORY = "kernel_advisory", "A kernel of a vendor is known to give wrong numbers on this machine."
    ENVIRONMENT_OVERRIDE = "environment_override", "A variable changes what an engine does, and no policy can see it."


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or worth knowing."""

    code: FindingCode
    severity: Literal["error", "warning", "info"]
    what: str
    why: str
    fix: str | None = None
