# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Opening a session on the QNN plugin provider, in this process, and nowhere else.

Both the caller's process and a worker come here. Nothing falls back: the CPU provider takes no node that the policy
does not list, and the constructor that retries on the CPU is switched off.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.errors import EngineUnavailable
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from xpuruntime.engines.qnn.options import Target

PROVIDER = "QNNExecutionProvider"
_FATAL, _WARNING = 4, 2
_lock = threading.Lock()
_claimed: Target | None = None
_owner = 0


class Placed(msgspec.Struct, frozen=True):
    """One node as ONNX Runtime hands it to a provider, before it is compiled."""

    provider: str
    name: str
    op: str
    domain: str


class Opening(msgspec.Struct, kw_only=True):
    """All that a process needs to know to open a session."""

    options: dict[str, str]
    strict: bool = True
    folder: str | None = None
    severity: int = _FATAL
    profile: str | None = None
    without: tuple[str, ...] = ()


def claim(target: Target) -> bool:
    """Make this process one of `target`, or say that it holds no session of it: it is one of another chip, or forked.

    QNN keeps what a graph was compiled for in the process: a second chip in it changes numbers. The claim is for good,
    also when the load that made it fails. Nor does QNN work in a child of a process that used it: its threads are in
    the parent, and a run would wait for them for ever.
    """
    global _claimed, _owner
    with _lock:
        if _claimed is None:
            _claimed, _owner = target, os.getpid()
        if _owner != os.getpid():
            return False
        return (_claimed.soc_model, _claimed.htp_arch) == (target.soc_model, target.htp_arch)


def construct(model: str | bytes, opening: Opening) -> Any:
    """Return an ``onnxruntime.InferenceSession`` with QNN as its provider. Raises what ONNX Runtime raises."""
    import onnxruntime as ort

    options = _session_options(model, opening)
    # ONNX Runtime also logs by a logger of the whole process; what goes wrong reaches the caller as an exception.
    ort.set_default_logger_severity(opening.severity)
    try:
        return ort.InferenceSession(model, options, enable_fallback=0, read_config_from_model=0)
    finally:
        if opening.severity:
            ort.set_default_logger_severity(_WARNING)


def compile_file(model: str | bytes, opening: Opening, path: str) -> None:
    """Write a model compiled for the chip, with its context binary beside it. Raises what ONNX Runtime raises."""
    import onnxruntime as ort

    compiler = ort.ModelCompiler(
        _session_options(model, opening),
        model,
        embed_compiled_data_into_model=False,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        # Off by default, unlike in a session: then what a session folds, such as Shape, would be left to the CPU.
        graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    )
    compiler.compile_to_file(path)


def placements(session: Any) -> list[Placed]:
    """Return which provider each node of a session went to."""
    return [
        Placed(str(part.ep_name), str(node.name), str(node.op_type), str(node.domain))
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def _session_options(model: str | bytes, opening: Opening) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = opening.severity
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if opening.strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if opening.without:
        options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(opening.without))
    if isinstance(model, bytes) and opening.folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", opening.folder)
    if opening.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = opening.profile
    options.add_provider_for_devices([_device()], dict(opening.options))
    return options


def _device() -> Any:
    """Return ONNX Runtime's device of the provider; its library is registered once a process."""
    import onnxruntime as ort

    with _lock:
        devices = _devices(ort)
        if not devices:
            import onnxruntime_qnn

            load_backend(Path(onnxruntime_qnn.get_library_path()).parent)
            try:
                ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
            except Exception as error:  # ONNX Runtime's own exceptions, or those of the loader
                fix = "pip install --force-reinstall --no-deps onnxruntime-qnn"
                msg = f"ONNX Runtime cannot load the QNN provider: {error}. {fix}"
                raise EngineUnavailable(msg, engine="qnn", device="npu") from None
            devices = _devices(ort)
    if not devices:
        msg = (
            "the QNN provider is loaded but offers no device on this machine; the simulator needs Linux or Windows on "
            "x86-64, a device needs Qualcomm's driver"
        )
        raise EngineUnavailable(msg, engine="qnn", device="npu")
    return devices[0]


def _devices(ort: Any) -> list[Any]:
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    return sorted(devices, key=lambda device: device.device.type != ort.OrtHardwareDeviceType.NPU)


_GREETING = b"LIBNATIVE:"


def load_backend(folder: Path) -> None:
    """Load the HTP library of the wheel in `folder` into this process; the provider finds it there."""
    if sys.platform == "win32":  # there the provider sets up the search path itself
        return
    library = folder / "libQnnHtp.so"
    try:
        with _without_greeting():
            ctypes.CDLL(str(library))
    except OSError as error:
        fix = "pip install --force-reinstall --no-deps onnxruntime-qnn"
        raise EngineUnavailable(
            f"QNN's HTP library cannot be loaded: {error}. {fix}", engine="qnn", device="npu"
        ) from None


@contextlib.contextmanager
def _without_greeting() -> Iterator[None]:
    """Have the C library's `stdout` write into memory for a moment; all but the greeting is passed on afterwards."""
    # File descriptor 1 is left alone, so that nothing that Python or other processes write is touched. The stream in
    # memory is never closed: another thread may hold it, and what it writes late is then lost instead of a crash.
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    for name, count in (("fflush", 1), ("fwrite", 4), ("open_memstream", 2)):
        getattr(libc, name).argtypes = [ctypes.c_void_p] * count
    libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    current = ctypes.c_void_p.in_dll(libc, "stdout")
    real = current.value
    room, size = ctypes.c_void_p(), ctypes.c_size_t()
    memory = libc.open_memstream(ctypes.byref(room), ctypes.byref(size))
    if not memory or not real:
        yield
        return
    libc.fflush(real)
    current.value = memory
    try:
        yield
    finally:
        current.value = real
        libc.fflush(memory)
        said = ctypes.string_at(room, size.value) if room.value else b""
        kept = b"".join(line for line in said.splitlines(keepends=True) if _GREETING not in line)
        if kept:
            libc.fwrite(kept, 1, len(kept), real)
            libc.fflush(real)
        _kept_alive.append((room, size))


#: Where the stream in memory puts its buffer: it may still write to these.
_kept_alive: list[tuple[ctypes.c_void_p, ctypes.c_size_t]] = []


# --- what a worker is asked for; arrays go as text

_open: dict[int, Any] = {}


def open_session(number: int, path: str | None, text: str | None, opening: dict[str, Any]) -> dict[str, Any]:
    """Open a session on a file, or on its bytes as text; return its `outputs`, and where its nodes are `placed`."""
    session = _open[number] = construct(path or base64.b64decode(text or ""), msgspec.convert(opening, Opening))
    return {
        "outputs": [output.name for output in session.get_outputs()],
        "placed": [msgspec.to_builtins(placement) for placement in placements(session)],
    }


def run_session(number: int, feeds: dict[str, Any]) -> dict[str, Any]:
    """Run on encoded arrays, and return the results encoded."""
    from xpuruntime.engines.onnxruntime._private_api import raw_session

    session = _open[number]
    names = [output.name for output in session.get_outputs()]
    return encoded(dict(zip(names, raw_session(session).run(names, decoded(feeds), None), strict=True)))


def drop_session(number: int) -> None:
    """Let go of a session."""
    _open.pop(number, None)


def compile_session(path: str | None, text: str | None, opening: dict[str, Any], out: str) -> None:
    """Compile a file, or its bytes as text, into the file `out`."""
    compile_file(path or base64.b64decode(text or ""), msgspec.convert(opening, Opening), out)


def encoded(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes, shapes and bytes of arrays, as JSON has them."""
    return {
        name: [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]
        for name, array in arrays.items()
    }


def decoded(arrays: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays that may be written."""
    return {
        name: np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(shape)
        for name, (dtype, shape, text) in arrays.items()
    }


_WHEEL = "onnxruntime-qnn"
#: The first wheel that is a plugin, and the ONNX Runtime that it needs.
_OLDEST, _NEEDS = (2, 0), (1, 24, 2)
_PLUGIN, _BACKENDS = "onnxruntime_providers_qnn", ("QnnHtp", "QnnSystem")


def _wide() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def missing(name: str) -> EngineFacts:
    """Return the facts of a machine without the wheel, with the command that installs it."""
    fix = f"`pip install {_WHEEL}` (the extra xpuruntime[qnn])"
    if _wide():
        fix = f"`pip install --no-deps {_WHEEL}` (xpuruntime[qnn] installs it on ARM only: it brings onnxruntime along)"
    return EngineFacts(name=name, reason=f"the wheel {_WHEEL} is not installed", fix=fix)


def probe(name: str) -> EngineFacts:
    """Say what is installed and whether its libraries are whole. Never raises."""
    version = installed(_WHEEL).get(_WHEEL)
    if version is None:
        return missing(name)
    again = f"pip install --force-reinstall --no-deps {_WHEEL}"

    def broken(reason: str, fix: str) -> EngineFacts:
        return EngineFacts(name=name, version=version, reason=reason, fix=fix)

    spec = importlib.util.find_spec("onnxruntime_qnn")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None:
        return broken(f"{_WHEEL} is recorded as installed, but its files are gone", again)
    if _release(version) < _OLDEST:
        return broken(
            f"{_WHEEL} {version} is no plugin for ONNX Runtime: that begins with version 2", f"{again} --upgrade"
        )
    if importlib.util.find_spec("onnxruntime") is None:
        return broken("the QNN provider is a plugin of ONNX Runtime, which is not installed", "xrt doctor")
    for host, host_version in installed("onnxruntime-gpu", "onnxruntime").items():
        if _release(host_version) < _NEEDS:
            needs = ".".join(map(str, _NEEDS))
            return broken(
                f"{_WHEEL} {version} is a plugin for ONNX Runtime {needs} or later, and {host} "
                f"{host_version} is installed",
                f'pip install --upgrade "{host}>={needs}"',
            )
    for problem in _problems(folder):
        return broken(problem, again)
    detail = {"wheel": f"{_WHEEL} {version}", "runs_on": "simulator" if _wide() else "device"}
    sdk = _sdk(folder)
    if sdk:
        detail["sdk"] = sdk
    backends = [path.stem.removeprefix("lib") for path in sorted(folder.iterdir()) if path.suffix in (".so", ".dll")]
    detail["libraries"] = ", ".join(backends)
    return EngineFacts(name=name, version=version, loadable=True, providers=("QNNExecutionProvider",), detail=detail)


def _problems(folder: Path) -> Iterator[str]:
    from xpuruntime.errors import InputError
    from xpuruntime.runtime.libraries.search import read_elf

    for stem in (_PLUGIN, *_BACKENDS):
        file = folder / (f"{stem}.dll" if sys.platform == "win32" else f"lib{stem}.so")
        if not file.is_file():
            yield f"{file.name} is not in {folder}"
        elif sys.platform != "win32":
            try:
                read_elf(file)
            except InputError as error:
                yield str(error)


def _sdk(folder: Path) -> str | None:
    try:
        text = (folder / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "qnn_version":
            return value.strip().strip("'\"")
    return None


def _release(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")
    return tuple(int(part) for part in head if part.isdigit())
