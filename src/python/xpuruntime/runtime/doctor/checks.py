# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of the installed Python packages, the NVIDIA driver and the CUDA libraries: pure functions of `Facts`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xpuruntime.runtime.doctor.facts import Facts, Finding, FindingCode, Package
from xpuruntime.runtime.packages import install_command, reinstall_command

if TYPE_CHECKING:
    from xpuruntime.runtime.machine import Library

PIP = "python -m pip"
#: What the QNN plug-in asks of ONNX Runtime; pip does not hold it where it was installed without what it requires.
_QNN_NEEDS = ">=1.24.2"


def ort_wheel_for(system: str, architecture: str) -> str:
    """Return the one ONNX Runtime wheel this package depends on, for a platform."""
    wide = architecture.lower() in {"x86_64", "amd64"}
    return "onnxruntime-gpu" if wide and system in {"Linux", "Windows"} else "onnxruntime"


def check_onnxruntime(facts: Facts) -> Iterator[Finding]:
    """Check that exactly one wheel owns the folder ``onnxruntime``, and that its files are the ones on disk."""
    wanted = ort_wheel_for(facts.machine.system, facts.machine.architecture)
    owners = _first_of_each([package for package in facts.packages if package.provides_onnxruntime])
    range_ = next((spec for name, spec, _ in map(_parse, facts.requirements) if name == wanted), "")
    again = f'{PIP} install --force-reinstall --no-deps "{wanted}{range_}"'
    if not owners and facts.ort is None:
        yield Finding(
            code=FindingCode.ORT_MISSING,
            severity="error",
            what="ONNX Runtime is not installed",
            why="no installed package provides the module onnxruntime",
            fix=f'{PIP} install "{wanted}{range_}"',
        )
        return
    if len(owners) > 1:
        names = " ".join(package.name for package in owners)
        listed = " and ".join(f"{package.name} {package.version}" for package in owners)
        yield Finding(
            code=FindingCode.ORT_CLASH,
            severity="error",
            what=f"{listed} are installed over each other",
            why="they write the same files in the folder onnxruntime, so what runs is a mixture of them",
            fix=f'{PIP} uninstall -y {names} && {PIP} install "{wanted}{range_}"' + _qnn(facts, wanted),
        )
        return
    if owners and facts.ort is None:
        yield Finding(
            code=FindingCode.ORT_FILES_MISSING,
            severity="error",
            what=f"{owners[0].name} {owners[0].version} is recorded as installed, but its files are gone",
            why="another ONNX Runtime wheel was installed over it and then removed, with the files they shared",
            fix=again,
        )
        return
    if facts.ort is None:
        return
    if facts.ort.version is None:
        yield Finding(
            code=FindingCode.ORT_FILES_MISSING,
            severity="error",
            what=f"the ONNX Runtime in {facts.ort.folder} lacks files",
            why="its build record cannot be read; another wheel of it was probably removed",
            fix=again,
        )
    elif owners and _plain(owners[0].version) != _plain(facts.ort.version):
        yield Finding(
            code=FindingCode.ORT_OVERWRITTEN,
            severity="error",
            what=f"{owners[0].name} {owners[0].version} is recorded, but the files are those of {facts.ort.version}",
            why="another ONNX Runtime wheel was unpacked over it",
            fix=again,
        )
    elif facts.ort.package and owners and facts.ort.package != owners[0].name:
        yield Finding(
            code=FindingCode.ORT_OVERWRITTEN,
            severity="error",
            what=f"{owners[0].name} is recorded, but the files are those of {facts.ort.package}",
            why="another ONNX Runtime wheel was unpacked over it",
            fix=again,
        )
    elif owners and owners[0].name == "onnxruntime" and wanted == "onnxruntime-gpu" and facts.driver.hardware:
        yield Finding(
            code=FindingCode.ORT_CPU_ONLY,
            severity="error",
            what="the installed ONNX Runtime has no CUDA provider, and this machine has an NVIDIA device",
            why="the wheel onnxruntime is built for the CPU only on this platform",
            fix=f'{PIP} uninstall -y onnxruntime && {PIP} install "{wanted}{range_}"',
        )


def check_qnn(facts: Facts) -> Iterator[Finding]:
    """Check what the QNN plug-in sits on: it requires ``onnxruntime``, which on x86-64 must not be installed."""
    plugin = next((p for p in facts.packages if p.name == "onnxruntime-qnn" and not p.provides_onnxruntime), None)
    if plugin is None:
        return
    wanted = ort_wheel_for(facts.machine.system, facts.machine.architecture)
    owners = {package.name for package in facts.packages if package.provides_onnxruntime}
    version = facts.ort.version if facts.ort is not None else None
    if version is not None and not in_range(version, _QNN_NEEDS):
        yield Finding(
            code=FindingCode.QNN_ORT_TOO_OLD,
            severity="error",
            what=f"onnxruntime-qnn {plugin.version} is a plug-in for ONNX Runtime {_QNN_NEEDS}, and this is {version}",
            why="it was installed without what it requires, so pip did not compare them",
            fix=f'{PIP} install --upgrade "{wanted}{_QNN_NEEDS}"',
        )
    if owners == {"onnxruntime"} and wanted != "onnxruntime" and not facts.driver.hardware:
        yield Finding(
            code=FindingCode.QNN_PULLED_ONNXRUNTIME,
            severity="warning",
            what=f"onnxruntime-qnn {plugin.version} came with onnxruntime, in place of {wanted}",
            why=f"it requires onnxruntime; {wanted} serves it as well, and the two cannot be installed together",
            fix=f'{PIP} uninstall -y onnxruntime && {PIP} install "{wanted}{_QNN_NEEDS}"' + _qnn(facts, wanted),
        )


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Check that no package is installed twice in folders that Python searches."""
    names: dict[str, list[Package]] = {}
    for package in facts.packages:
        names.setdefault(package.name, []).append(package)
    concern = {name for name, _, _ in map(_parse, facts.requirements)} | {"xpuruntime"}
    for name, copies in sorted(names.items()):
        if len(copies) > 1 and name in concern and len({copy.version for copy in copies}) > 1:
            where = ", ".join(f"{copy.version} in {copy.location}" for copy in copies)
            yield Finding(
                code=FindingCode.PACKAGE_TWICE,
                severity="warning",
                what=f"{name} is installed more than once: {where}",
                why="the first folder on sys.path is used, which another program may change",
                fix=f"{PIP} uninstall -y {name} && {PIP} install {name}",
            )


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Check the installed versions against this package's own requirements."""
    installed: dict[str, str] = {}
    for package in facts.packages:
        installed.setdefault(package.name, package.version)
    for name, spec, marker in sorted(set(map(_parse, facts.requirements))):
        version = installed.get(name)
        if version is None:
            if not marker:
                yield Finding(
                    code=FindingCode.PACKAGE_MISSING,
                    severity="error",
                    what=f"{name} is not installed",
                    why=f"xpuruntime needs {name}{spec}",
                    fix=f'{PIP} install "{name}{spec}"',
                )
        elif spec and not in_range(version, spec):
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
            yield Finding(
                code=FindingCode.PACKAGE_OUT_OF_RANGE,
                severity="warning" if extra else "error",
                what=f"{name} {version} is outside the supported range {spec}",
                why="xpuruntime" + (f"[{extra[1]}]" if extra else "") + f" is made for {name}{spec}",
                fix=f'{PIP} install "{name}{spec}"',
            )


def in_range(version: str, spec: str) -> bool:
    """Whether a version meets a specifier of ``>=``, ``>``, ``<=``, ``<``, ``==`` and ``!=`` parts.

    Only release numbers are compared; a part that cannot be read is not compared with the version.
    """
    have = _release(version)
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*([\d.]+)", part)
        if match is None or not have:
            continue
        want = _release(match[2])
        width = max(len(have), len(want))
        left, right = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
        order = (left > right) - (left < right)
        if not {">=": order >= 0, "<=": order <= 0, "==": order == 0, "!=": order != 0, ">": order > 0, "<": order < 0}[
            match[1]
        ]:
            return False
    return True


def _qnn(facts: Facts, wanted: str) -> str:
    if wanted == "onnxruntime" or not any(package.name == "onnxruntime-qnn" for package in facts.packages):
        return ""
    return f" && {PIP} install --force-reinstall --no-deps onnxruntime-qnn"


def _parse(line: str) -> tuple[str, str, str]:
    requirement, _, marker = line.partition(";")
    match = re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", requirement)
    if match is None:
        return line.strip(), "", marker.strip()
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2].replace(" ", ""), marker.strip()


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _plain(version: str) -> str:
    return version.split("+")[0]


def _first_of_each(packages: list[Package]) -> list[Package]:
    first: dict[str, Package] = {}
    for package in packages:
        first.setdefault(package.name, package)
    return list(first.values())


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
