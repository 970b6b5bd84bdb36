# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Probe of OpenVINO: its installation and its devices, without importing it where that is possible."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from xpuruntime.engines.openvino.process_core import process_core
from xpuruntime.engines.openvino.sigaltstack_guard import kept_signal_stack
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import install_command, installed

__all__ = ["device_word", "our_device", "probe"]

_NAME = "openvino"
_AGAIN = f"pip install --force-reinstall {_NAME}"
_INTEL = "0x8086"
_PLUGINS = {"CPU": "intel_cpu", "GPU": "intel_gpu", "NPU": "intel_npu"}
_NEEDS = {
    "GPU": "an Intel GPU, its kernel driver and the OpenCL runtime (libOpenCL.so.1, intel-opencl-icd)",
    "NPU": "an Intel NPU, its kernel driver (intel_vpu) and the user-space driver (intel-level-zero-npu)",
}


def device_word(device: str) -> str:
    """Return OpenVINO's name of an xpuruntime device: ``"gpu:1"`` is ``"GPU.1"``."""
    kind, _, index = device.partition(":")
    return kind.upper() + (f".{index}" if index else "")


def our_device(word: str) -> str:
    """Return xpuruntime's name of a device of OpenVINO."""
    kind, _, index = word.partition(".")
    return kind.lower() + (f":{index}" if index else "")


def probe() -> EngineFacts:
    """Say what is installed. OpenVINO is imported only where it already is, or an Intel GPU or NPU may be there.

    On Linux a GPU or NPU has a device node; without one of Intel's there is only the CPU, and the 0.2 s that the import
    takes are saved.
    """
    version = installed(_NAME).get(_NAME)
    if version is None:
        return EngineFacts(name=_NAME, reason="the package openvino is not installed", fix=install_command("openvino"))
    try:
        missing = _missing_files()
        if missing is not None:
            return _broken(version, missing)
        if _NAME in sys.modules or not sys.platform.startswith("linux") or _accelerator_nodes():
            return _ask(version)
    except Exception as error:  # a vendor package can fail in any way
        return _broken(version, f"the package openvino does not import: {error}")
    absent = {kind: f"there is no Intel {kind} here; it needs {needs}" for kind, needs in _NEEDS.items()}
    return EngineFacts(
        name=_NAME,
        version=version,
        loadable=True,
        providers=("CPU",),
        broken=absent,
        detail={"devices": "CPU; no device node of an Intel GPU or NPU was found, so OpenVINO was not asked"},
    )


def _broken(version: str, reason: str) -> EngineFacts:
    return EngineFacts(name=_NAME, version=version, reason=reason, fix=_AGAIN)


def _missing_files() -> str | None:
    """Return what an incomplete installation lacks; looks without importing."""
    spec = importlib.util.find_spec(_NAME)
    if spec is None or not spec.submodule_search_locations:
        return "the package openvino is registered with pip, but its folder is gone"
    folder = Path(next(iter(spec.submodule_search_locations)))
    built = [name for suffix in importlib.machinery.EXTENSION_SUFFIXES if (name := f"_pyopenvino{suffix}")]
    if not any((folder / name).is_file() for name in built):
        return f"the package openvino has no extension module for Python {sys.version_info[0]}.{sys.version_info[1]}"
    return None


def _accelerator_nodes() -> bool:
    """Say whether Linux shows a GPU or NPU of Intel, or of an unknown maker."""
    nodes = [*Path("/dev/dri").glob("renderD*"), *Path("/dev/accel").glob("accel*")]
    return any(_vendor(node) in (_INTEL, None) for node in nodes) or Path("/dev/dxg").exists()


def _vendor(node: Path) -> str | None:
    group = "drm" if "dri" in node.parts else "accel"
    try:
        return Path(f"/sys/class/{group}/{node.name}/device/vendor").read_text(encoding="ascii").strip()
    except OSError:
        return None


@functools.lru_cache(maxsize=1)
def _ask(version: str) -> EngineFacts:
    """Ask OpenVINO which devices it has. Once a process: loading the plugins takes time."""
    with kept_signal_stack():
        return _devices(version)


def _devices(version: str) -> EngineFacts:
    import openvino

    core = process_core()
    found: list[str] = []
    broken: dict[str, str] = {}
    detail = {"build": str(openvino.get_version())}
    for kind in _PLUGINS:
        indices = _indices(core, kind, broken)
        words = [kind] if len(indices) == 1 and indices[0] in ("", "0") else [f"{kind}.{index}" for index in indices]
        for word in words:
            detail[word] = str(core.get_property(word, "FULL_DEVICE_NAME"))
        found += words
    fix = _AGAIN if "CPU" in broken else None
    return EngineFacts(
        name=_NAME, version=version, loadable=True, providers=tuple(found), broken=broken, fix=fix, detail=detail
    )


def _indices(core: Any, kind: str, broken: dict[str, str]) -> list[str]:
    try:
        indices = [str(index) for index in core.get_property(kind, "AVAILABLE_DEVICES")]
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line and not line.startswith("Exception from")]
        broken[kind] = f"{lines[0] if lines else error}; it needs {_NEEDS.get(kind, 'the plugin of the wheel')}"
        return []
    if not indices:
        broken[kind] = f"OpenVINO finds none; it needs {_NEEDS.get(kind, 'the plugin of the wheel')}"
    return indices
