# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""OpenVINO in this process: its core, the signal stack that it takes, what is installed, and its failures."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import (
    EngineError,
    EngineFailed,
    ModelError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.runtime.interruptible_waits import kept_signal_stack
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import install_command, installed
from xpuruntime.runtime.session_registry import reset_in_child, rest_for_fork

if TYPE_CHECKING:
    from xpuruntime.engines.model import NodeInfo

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
    device_words: list[str] = []
    broken: dict[str, str] = {}
    detail = {"build": str(openvino.get_version())}
    for kind in _PLUGINS:
        indices = _indices(core, kind, broken)
        words = [kind] if len(indices) == 1 and indices[0] in ("", "0") else [f"{kind}.{index}" for index in indices]
        for word in words:
            detail[word] = str(core.get_property(word, "FULL_DEVICE_NAME"))
        device_words += words
    fix = _AGAIN if "CPU" in broken else None
    return EngineFacts(
        name=_NAME, version=version, loadable=True, providers=tuple(device_words), broken=broken, fix=fix, detail=detail
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


class _Kept:
    """The shared `Core`, and what a fork does about it."""

    def __init__(self) -> None:
        self.core: Any = None
        #: Cores of the parents of a process that was forked: their locks may be held, and their threads are not here.
        self.parents: list[Any] = []
        self.lock = threading.Lock()
        rest_for_fork(self)
        reset_in_child(self)

    def get(self) -> Any:
        with self.lock:
            if self.core is None:
                import openvino as ov

                core = ov.Core()
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(core))  # not even at the end of the process
                self.core = core
            return self.core

    def before_fork(self) -> None:
        """Free executors that wait to be used again: a child has none of their threads, and would wait for them."""
        if self.core is None:
            return
        import openvino as ov

        with kept_signal_stack():
            ov.Core().get_property("CPU", "FULL_DEVICE_NAME")  # loads a CPU plugin, which frees them when it is dropped

    def in_child(self) -> None:
        self.parents.append(self.core)
        self.core = None


_kept = _Kept()


def process_core() -> Any:
    """Return the shared `openvino.Core`. It is to be given properties with each call, and none for good."""
    return _kept.get()


_WHERE = re.compile(r"^(?:Exception from|Check '.*' failed at) src/\S+?:\d+:\s*$")
_OUT_OF_MEMORY = re.compile(
    r"bad[_ ]alloc|out of memory|failed to allocate|CL_OUT_OF_(?:HOST_MEMORY|RESOURCES)|exceeded max size of memory"
    r"|CL_MEM_OBJECT_ALLOCATION_FAILURE|std::length_error",
    re.IGNORECASE,
)
_UNKNOWN_OPS = re.compile(r"No conversion rule found for operations: (?P<ops>[^\n]+)")
_FAILED_OPS = re.compile(r"Conversion is failed for: (?P<ops>[^\n]+)")
_DYNAMIC_RANK = re.compile(r"doesn't support (?P<op>\w+) operation with dynamic rank")
_BAD_MODEL = re.compile(
    r"Unable to read the model|Model can't be parsed|Error parsing|FrontEnd API failed with (?!OpConversion)"
    r"|Could not deserialize|Cannot import compiled blob|not a valid|incompatible runtime requirements"
)


def translate(error: BaseException, *, doing: str, device: str, nodes: Sequence[NodeInfo] = ()) -> XpuRuntimeError:
    """Return `error` as an xpuruntime error."""
    if isinstance(error, XpuRuntimeError):
        return error
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not _WHERE.match(line)) or type(error).__name__
    message = f"{doing} on {device} failed in OpenVINO: {text}"
    known = {"engine": "openvino", "device": device, "status": type(error).__name__}
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        fix = "Use a smaller batch, or free other sessions; this session still works."
        return OutOfMemoryError(f"{message}. {fix}", **known)
    refused = _refused(str(error), text, nodes)
    if refused is not None:
        return UnsupportedOperationError(f"{doing} on {device} failed: {refused}", **known)
    if "No CPU resources available" in text:
        fix = "Another session has all cores for itself (ENABLE_CPU_RESERVATION); close it, or drop that option"
        return EngineError(f"{message} {fix}", **known)
    if _BAD_MODEL.search(text):
        return ModelError(message, **known)
    return EngineFailed(message, **known)


def _refused(raw: str, text: str, nodes: Sequence[NodeInfo]) -> str | None:
    """Return which operators OpenVINO does not take, and what to do; ``None`` where it is about something else."""
    other = "Use another engine (execution.engine: onnxruntime), or export the model without them"
    unknown, failed = _UNKNOWN_OPS.search(raw), _FAILED_OPS.search(raw)
    if unknown is not None:
        return f"OpenVINO has no conversion for the operators {_named(unknown['ops'], nodes)}. {other}"
    if failed is not None:
        said = text.partition("with a message:")[2].partition("Summary:")[0].strip()[:400]
        ops = _named(failed["ops"], nodes)
        return f"OpenVINO cannot convert the operators {ops} as they are used here: {said}. {other}"
    rank = _DYNAMIC_RANK.search(raw)
    if rank is not None:
        fix = "State the sizes of the inputs (execution.shapes), or use another engine (execution.engine: onnxruntime)"
        return f"the rank of a result of {rank['op']} depends on values, and the CPU plugin needs it fixed. {fix}"
    return None


def _named(listed: str, nodes: Sequence[NodeInfo]) -> str:
    ops = {entry.strip().rpartition(".")[2].partition("-")[0] for entry in listed.split(",")}
    names = [node.name for node in nodes if node.op in ops]
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return listed.strip() + (f" (node {', '.join(map(repr, names[:4]))}{rest})" if names else "")
