# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of the NVIDIA driver and the CUDA libraries: pure functions of `Facts`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xpuruntime.runtime.doctor.facts import Finding, FindingCode
from xpuruntime.runtime.packages import install_command, reinstall_command

if TYPE_CHECKING:
    from xpuruntime.runtime.doctor.facts import Facts
    from xpuruntime.runtime.machine import Library

#: Wheels with the headers that the core is built with.
_HEADERS = "nvidia-cublas nvidia-cudnn-cu13 nvidia-cudnn-frontend"
#: The first driver branch that serves each CUDA major version.
_BRANCH = {11: 450, 12: 525, 13: 580}


def cuda_extra() -> str:
    """Return the command that installs the CUDA libraries which ONNX Runtime loads."""
    return install_command("cuda").replace("pip", "python -m pip", 1)


def _rebuild() -> str:
    return reinstall_command("--no-binary xpuruntime ")


def has_nvidia(facts: Facts) -> bool:
    """Whether there is an NVIDIA device, or a driver that says so."""
    return bool(facts.machine.cuda or facts.driver.hardware or facts.driver.module)


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Check that the driver is there, loaded, of one version, and new enough."""
    driver = facts.driver
    if not has_nvidia(facts) and driver.library is None:
        yield Finding(
            code=FindingCode.NO_NVIDIA_DEVICE,
            severity="info",
            what="there is no NVIDIA device and no NVIDIA driver",
            why=facts.machine.cuda_reason or "neither hardware nor a driver was found; models run on the CPU",
        )
        return
    if driver.library is None:
        yield Finding(
            code=FindingCode.DRIVER_MISSING,
            severity="error",
            what="there is an NVIDIA device, but the driver's library libcuda.so.1 was not found",
            why="no driver is installed, or this is a container that was not given the device",
            fix="sudo ubuntu-drivers install (or your system's NVIDIA driver); a container: start it with --gpus all",
        )
        return
    if driver.hardware and driver.module is None and not facts.machine.cuda:
        yield Finding(
            code=FindingCode.DRIVER_NOT_LOADED,
            severity="error",
            what="the NVIDIA driver is installed, but its kernel module is not loaded",
            why="/proc/driver/nvidia/version is missing",
            fix="sudo modprobe nvidia (after an update of the driver or the kernel: sudo reboot)",
        )
    match = re.search(r"\.so\.(\d+\.[\d.]+)$", driver.library)
    if driver.module and match and match[1] != driver.module:
        yield Finding(
            code=FindingCode.DRIVER_MISMATCH,
            severity="error",
            what=f"the driver's library is {match[1]}, the loaded kernel module {driver.module}",
            why="the driver was updated while the old module stays loaded; no CUDA call works until they agree",
            fix="sudo reboot",
        )
    needed = _needed_cuda(facts)
    if driver.cuda and needed and driver.cuda[0] < needed[0]:
        branch = f"{_BRANCH[needed[0]]} or newer" if needed[0] in _BRANCH else f"for CUDA {needed[0]}"
        yield Finding(
            code=FindingCode.DRIVER_TOO_OLD,
            severity="error",
            what=f"the NVIDIA driver serves CUDA {driver.cuda[0]}.{driver.cuda[1]} at most, "
            f"and {needed[1]} needs CUDA {needed[0]}",
            why="a driver runs programs built for its own CUDA major version and older ones",
            fix=f"install an NVIDIA driver {branch}",
        )
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not facts.machine.cuda and facts.machine.core_cuda:
        yield Finding(
            code=FindingCode.DEVICES_HIDDEN,
            severity="warning",
            what=f"CUDA_VISIBLE_DEVICES is {hidden!r}, and no CUDA device is visible",
            why="the variable hides devices from every program started with it",
            fix="unset CUDA_VISIBLE_DEVICES",
        )


def check_core_build(facts: Facts) -> Iterator[Finding]:
    """Check that the core has CUDA where there is a device."""
    if facts.core_error is not None:
        yield Finding(
            code=FindingCode.CORE_MISSING,
            severity="error",
            what="the core module xpuruntime._core cannot be imported",
            why=facts.core_error,
            fix=reinstall_command(),
        )
    elif not facts.machine.core_cuda:
        present = has_nvidia(facts)
        yield Finding(
            code=FindingCode.CORE_WITHOUT_CUDA,
            severity="warning" if present else "info",
            what="the core module was built without CUDA"
            + (", and this machine has an NVIDIA device" if present else ""),
            why="nvcc was not found when it was built; CUDA streams, pools and tensors are not available",
            fix=f"CUDACXX=/usr/local/cuda/bin/nvcc {_rebuild()}" if present else None,
        )


def check_backends(facts: Facts) -> Iterator[Finding]:
    """Check that a core with CUDA has the kernels of NVIDIA's libraries."""
    if facts.build is None or not facts.build.cuda:
        return
    kinds = {
        "cuBLAS": (facts.build.cublas, "cublasLt.h"),
        "cuDNN": (facts.build.cudnn, "cudnn_graph.h or cudnn_frontend.h"),
    }
    for name, (built, header) in kinds.items():
        if not built:
            yield Finding(
                code=FindingCode.CORE_WITHOUT_BACKEND,
                severity="warning" if has_nvidia(facts) else "info",
                what=f"the core module was built without the kernels of {name}",
                why=f"{header} was not found when it was built; xpuruntime.ops does without {name}",
                fix=f"python -m pip install --no-deps {_HEADERS} && {_rebuild()}",
            )
    if not facts.build.cupti:
        yield Finding(
            code=FindingCode.CORE_WITHOUT_CUPTI,
            severity="info",
            what="the core module was built without CUPTI",
            why="cupti.h or nvtx3/nvToolsExt.h was not found when it was built; without PyTorch, xpuruntime.profile "
            "times kernels of xpuruntime by CUDA events and sees nothing else of a device",
            fix=f"install CUPTI and NVTX of the CUDA toolkit, and: {_rebuild()}",
        )


def check_libraries(facts: Facts) -> Iterator[Finding]:
    """Check that the libraries the CUDA provider needs are there, of the right major version, and found once."""
    if facts.ort is None or not has_nvidia(facts):
        return
    for soname in (*facts.ort.linked, *facts.ort.later):
        name, _, rest = soname.removeprefix("lib").partition(".so.")
        major = rest.split(".")[0]
        everything = facts.libraries.get(name, ())
        fitting = [library for library in everything if _major(library) == major]
        if not fitting:
            yield _missing(facts, soname, name, major, everything)
        else:
            yield from _shadowed(facts, soname, fitting)


def check_loaded(facts: Facts) -> Iterator[Finding]:
    """Check that this process has not loaded one library twice."""
    seen: dict[str, list[Library]] = {}
    for library in facts.loaded:
        seen.setdefault(library.name.split(".so")[0], []).append(library)
    for name, copies in sorted(seen.items()):
        if len({copy.path for copy in copies}) > 1 and not name.startswith("_core"):
            yield Finding(
                code=FindingCode.LIBRARY_LOADED_TWICE,
                severity="warning",
                what=f"this process has loaded {name} twice: {_list(copies)}",
                why="two copies of one library keep separate state; memory, handles and streams may not be shared",
                fix="keep one of them: remove the other package, or its folder from LD_LIBRARY_PATH",
            )


def _missing(facts: Facts, soname: str, name: str, major: str, others: tuple[Library, ...]) -> Finding:
    assert facts.ort is not None
    needs = f"ONNX Runtime {facts.ort.version or ''} ({facts.ort.package or 'onnxruntime'})".replace("  ", " ")
    if others:
        return Finding(
            code=FindingCode.CUDA_MAJOR_MISMATCH,
            severity="error",
            what=f"{soname} was not found, only {_list(others)}",
            why=f"{needs} is built for CUDA {facts.ort.cuda or '?'} and loads major version {major} of {name} only",
            fix=cuda_extra(),
        )
    linked = soname in facts.ort.linked
    required = linked or name == "cudnn"
    return Finding(
        code=FindingCode.LIBRARY_MISSING,
        severity="error" if required else "warning",
        what=f"{soname} was not found",
        why=(f"the CUDA provider of {needs} " + ("does not load without it" if linked else "opens it while running"))
        + f". Searched: {facts.searched or 'nothing'}",
        fix=cuda_extra(),
    )


def _shadowed(facts: Facts, soname: str, copies: list[Library]) -> Iterator[Finding]:
    if len({copy.version for copy in copies}) < 2:
        return
    wheel = next((copy for copy in copies if copy.origin == "wheel"), None)
    path = next((copy for copy in copies if copy.origin == "LD_LIBRARY_PATH"), None)
    if wheel and path and wheel.version != path.version:
        folder = path.path.rsplit("/", 1)[0]
        kept = [part for part in facts.environment.get("LD_LIBRARY_PATH", "").split(":") if part]
        left = [part for part in kept if part.rstrip("/") != folder]
        yield Finding(
            code=FindingCode.LIBRARY_PATH_SHADOWS_WHEEL,
            severity="warning",
            what=f"{soname} is on LD_LIBRARY_PATH as {path.version or 'unknown'} ({path.path}), "
            f"and in a wheel as {wheel.version or 'unknown'} ({wheel.path})",
            why="a program that does not load the wheel's copy first gets the one on LD_LIBRARY_PATH",
            fix=f"export LD_LIBRARY_PATH={':'.join(left)}" if 0 < len(left) < len(kept) else "unset LD_LIBRARY_PATH",
        )
        return
    yield Finding(
        code=FindingCode.LIBRARY_SHADOWED,
        severity="info" if copies[0].origin == "wheel" else "warning",
        what=f"{soname} was found more than once with different versions: {_list(copies)}",
        why=f"the first is loaded before an engine asks ({copies[0].origin}), the others are shadowed",
        fix=None
        if copies[0].origin == "wheel"
        else f"{cuda_extra()}: the wheel's copy is then used whatever else is there",
    )


def _needed_cuda(facts: Facts) -> tuple[int, str] | None:
    if facts.ort is not None and facts.ort.cuda and facts.ort.linked:
        return int(facts.ort.cuda.split(".")[0]), f"ONNX Runtime {facts.ort.version or ''}".strip()
    return None


def _major(library: Library) -> str:
    match = re.search(r"\.so\.(\d+)", library.name) or re.search(r"\.so\.(\d+)", library.path)
    return match[1] if match else (library.version or "").split(".")[0]


def _list(libraries: list[Library] | tuple[Library, ...]) -> str:
    return ", ".join(
        f"{library.path} ({library.version or 'version unknown'}, {library.origin})" for library in libraries
    )
