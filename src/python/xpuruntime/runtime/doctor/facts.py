# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Facts that `doctor` looks at: packages, libraries, driver and environment, gathered once."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from xpuruntime.codes import Code
from xpuruntime.errors import InputError
from xpuruntime.runtime.libraries.loading import LibraryIndex, libraries_needed_by, loaded_libraries
from xpuruntime.runtime.machine import Library, Machine
from xpuruntime.runtime.packages import Distribution, distributions, failed_plugins

#: Variables that change what an engine does without being in any policy.
_OVERRIDES = re.compile(r"(ORT_|NVIDIA_TF32_OVERRIDE$|CUBLAS_|CUDNN_|CUDA_VISIBLE_DEVICES$|CUDA_LAUNCH_BLOCKING$|OV_)")
_PATHS = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
_DRIVER = Path("/proc/driver/nvidia/version")
_PCI = Path("/sys/bus/pci/devices")


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """An installed Python distribution."""

    name: str
    version: str
    location: str
    provides_onnxruntime: bool = False


class OrtFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The ONNX Runtime files that would be imported, read without importing them."""

    folder: str
    package: str | None = None
    version: str | None = None
    cuda: str | None = None
    linked: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver, looked at without the core."""

    hardware: tuple[str, ...] = ()
    module: str | None = None
    library: str | None = None
    cuda: tuple[int, int] | None = None


class BuildFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was built into the core module."""

    cuda: bool = False
    cublas: bool = False
    cudnn: bool = False
    cupti: bool = False
    architectures: str = ""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The route by which PyTorch's dispatcher reaches a policy; see `xpuruntime.pytorch.dispatch.fast_path`."""

    version: str
    route: str
    reason: str = ""
    fix: str = ""
    cudnn: tuple[int, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the checks read; they look at nothing else."""

    machine: Machine
    packages: tuple[Package, ...] = ()
    requirements: tuple[str, ...] = ()
    ort: OrtFacts | None = None
    driver: DriverFacts = DriverFacts()
    libraries: dict[str, tuple[Library, ...]] = {}
    loaded: tuple[Library, ...] = ()
    environment: dict[str, str] = {}
    core_error: str | None = None
    build: BuildFacts | None = None
    searched: str = ""
    plugins: tuple[str, ...] = ()
    torch: TorchFacts | None = None


def gather(
    machine: Machine,
    *,
    core_error: str | None = None,
    environ: Mapping[str, str] | None = None,
    torch: TorchFacts | None = None,
) -> Facts:
    """Look at the packages, libraries, driver and environment of this machine. Imports no vendor package."""
    env = os.environ if environ is None else environ
    ort = ort_facts()
    index = LibraryIndex()
    sonames = (*ort.linked, *ort.later) if ort else ()
    names = {_name_of(soname) for soname in sonames}
    return Facts(
        machine=machine,
        packages=packages(),
        requirements=own_requirements(),
        ort=ort,
        driver=driver_facts(),
        libraries={name: tuple(index.find(name)) for name in sorted(names)},
        loaded=loaded_libraries(),
        environment={key: value for key, value in sorted(env.items()) if key in _PATHS or _OVERRIDES.match(key)},
        core_error=core_error,
        build=build_facts() if core_error is None else None,
        searched=index.describe(),
        plugins=failed_plugins(),
        torch=torch,
    )


def build_facts() -> BuildFacts:
    """Ask the core what was built into it."""
    from xpuruntime import _core

    return msgspec.convert(_core.build_info(), BuildFacts)


def packages(paths: Sequence[str] | None = None) -> tuple[Package, ...]:
    """List the installed distributions, those of one name in the order of the search path."""
    return tuple(
        Package(
            name=distribution.name,
            version=distribution.version,
            location=distribution.location,
            provides_onnxruntime=_provides_onnxruntime(distribution),
        )
        for distribution in sorted(distributions(paths), key=lambda distribution: distribution.name)
    )


def own_requirements() -> tuple[str, ...]:
    """Return the requirement lines of this package's metadata, empty when it is not installed."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return tuple(requires("xpuruntime") or ())
    except PackageNotFoundError:
        return ()


def ort_facts(paths: Sequence[str] | None = None) -> OrtFacts | None:
    """Read which ONNX Runtime would be imported, without importing it."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("onnxruntime", None if paths is None else list(paths))
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    record = _assignments(folder / "capi" / "build_and_package_info.py")
    linked: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    provider = folder / "capi" / "libonnxruntime_providers_cuda.so"
    if provider.exists():
        try:
            linked, later = libraries_needed_by(provider)
        except InputError:
            linked, later = (), ()
    return OrtFacts(
        folder=str(folder),
        package=record.get("package_name"),
        version=record.get("__version__"),
        cuda=record.get("cuda_version") or None,
        linked=linked,
        later=later,
    )


def driver_facts(version_file: Path = _DRIVER, pci: Path = _PCI) -> DriverFacts:
    """Look for NVIDIA hardware, the kernel module and the driver's library."""
    hardware: list[str] = []
    try:
        devices = sorted(pci.iterdir())
    except OSError:
        devices = []
    for device in devices:
        vendor, kind = _read(device / "vendor"), _read(device / "class")
        if vendor == "0x10de" and kind.startswith(("0x0300", "0x0302")):
            hardware.append(device.name)
    library, cuda = _driver_library()
    module = kernel_module_version(version_file)
    return DriverFacts(hardware=tuple(hardware), module=module, library=library, cuda=cuda)


def kernel_module_version(version_file: Path = _DRIVER) -> str | None:
    """Return the version of NVIDIA's kernel module, or ``None`` where it is not loaded."""
    module = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", _read(version_file))
    return module[1] if module else None


def _driver_library() -> tuple[str | None, tuple[int, int] | None]:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return None, None
    loaded = loaded_libraries(("libcuda.so*",))
    path = loaded[0].path if loaded else name
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value <= 0:
        return path, None
    return path, (version.value // 1000, version.value % 1000 // 10)


def _assignments(path: Path) -> dict[str, str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _provides_onnxruntime(distribution: Distribution) -> bool:
    """Whether a distribution installs the folder ``onnxruntime`` itself; by name where it has no list of files."""
    if not distribution.name.startswith(("onnxruntime", "ort-")):
        return False
    files = distribution.files()
    if files is not None:
        return "onnxruntime/__init__.py" in files
    known = "gpu|directml|openvino|rocm|migraphx|training|training-cpu|cann|azure|silicon|webgpu|vitisai"
    return re.fullmatch(rf"onnxruntime(-({known}))?|ort-nightly(-\w+)*", distribution.name) is not None


def _name_of(soname: str) -> str:
    return soname.removeprefix("lib").split(".so")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


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
    LIBRARY_MISSING = "library_missing", "A library that the CUDA provider needs is missing."
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
