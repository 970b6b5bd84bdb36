# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Facts stated for the checks of `doctor`: a healthy GPU machine, and changes to it."""

from __future__ import annotations

from typing import Any

import msgspec
from machines import gpu, machine

from xpuruntime.runtime.doctor import Diagnosis, examine
from xpuruntime.runtime.doctor.facts import DriverFacts, Facts, OrtFacts, Package
from xpuruntime.runtime.machine import Library

H200 = gpu(pci_id="0000:01:00.0")
LAPTOP = machine(cuda_reason="no NVIDIA driver: libcuda.so.1 was not found")
GPU = msgspec.structs.replace(LAPTOP, cuda=(H200,), cuda_reason=None, core_cuda=True)
DRIVER = DriverFacts(
    hardware=("0000:01:00.0",), module="580.65.06", library="/usr/lib/libcuda.so.580.65.06", cuda=(13, 0)
)
LINKED = ("libcublasLt.so.13", "libcublas.so.13", "libcudart.so.13")
ORT = OrtFacts(
    folder="/site/onnxruntime",
    package="onnxruntime-gpu",
    version="1.31.1",
    cuda="13.0",
    linked=LINKED,
    later=("libcudnn.so.9", "libnvrtc.so.13"),
)
ORT_GPU = Package(name="onnxruntime-gpu", version="1.31.1", location="/site", provides_onnxruntime=True)
NUMPY = Package(name="numpy", version="2.4.6", location="/site")
REQUIREMENTS = (
    "numpy>=1.26",
    'onnxruntime-gpu>=1.23; (sys_platform == "linux" and platform_machine == "x86_64")',
    "nvidia-cublas<14,>=13; sys_platform == 'linux' and extra == 'cuda'",
)


def lib(name: str, version: str, origin: str = "wheel", folder: str = "/site/nvidia/lib") -> Library:
    return Library(name=name, path=f"{folder}/{name}", version=version, origin=origin)


FOUND = {
    name.removeprefix("lib").split(".so")[0]: (lib(name, name.rsplit(".", 1)[1] + ".1"),)
    for name in (*ORT.linked, *ORT.later)
}
HEALTHY = Facts(
    machine=GPU,
    packages=(NUMPY, ORT_GPU),
    requirements=REQUIREMENTS,
    ort=ORT,
    driver=DRIVER,
    libraries=FOUND,
    searched="/site/nvidia/lib (wheel)",
)


def facts(**changes: Any) -> Facts:
    return msgspec.structs.replace(HEALTHY, **changes)


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


def only(stated: Facts, severity: str = "error") -> Any:
    """Return the one finding, which must have a reason and a fix."""
    findings = examine(stated).findings
    assert len(findings) == 1, findings
    assert findings[0].severity == severity
    assert findings[0].why
    assert findings[0].fix or severity == "info"
    return findings[0]
