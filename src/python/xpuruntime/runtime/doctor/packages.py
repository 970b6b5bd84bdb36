# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of the installed Python packages: pure functions of `Facts`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xpuruntime.runtime.doctor.facts import Finding, FindingCode

if TYPE_CHECKING:
    from xpuruntime.runtime.doctor.facts import Facts, Package

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
