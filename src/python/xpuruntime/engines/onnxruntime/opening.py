# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Opening an ONNX Runtime session with every silent fallback closed.

There are four: nodes taken over by the CPU provider, the Python constructor that retries on the CPU, the Python ``run``
that does the same, and a CUDA provider whose library cannot be loaded, which is only a warning.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.onnxruntime.options import AFFINITIES, OPERATOR_LIBRARIES, OnnxRuntimeSettings
from xpuruntime.errors import (
    CudaError,
    EngineError,
    EngineFailed,
    EngineUnavailable,
    InputError,
    ModelError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.runtime.libraries.loading import EXTENSIONS, operator_library

if TYPE_CHECKING:
    from xpuruntime.engines.model_source import ModelSource

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
_WARNING, _ERROR, _FATAL = 2, 3, 4
_ASSIGNMENT = "session.record_ep_graph_assignment_info"
NO_CPU = "session.disable_cpu_ep_fallback"


class Assigned(msgspec.Struct, frozen=True):
    """One node and the provider that ONNX Runtime assigned it to, before fusion."""

    provider: str
    name: str
    op: str
    domain: str


class Opened:
    """An open session with what was checked about it."""

    def __init__(self, session: Any, placements: list[Assigned] | None) -> None:
        self.session = session
        self.placements = placements


def session_options(settings: OnnxRuntimeSettings, source: ModelSource) -> Any:
    """Return ``SessionOptions`` for `settings`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = _FATAL  # failures reach the caller as exceptions, not as lines on stderr
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[settings.level])
    if settings.threads is not None:
        options.intra_op_num_threads = settings.threads
    if settings.inter_threads is not None:
        options.inter_op_num_threads = settings.inter_threads
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.use_deterministic_compute = settings.deterministic
    if settings.provider == "DmlExecutionProvider":
        options.enable_mem_pattern = False  # the provider is documented not to work with it
    for key, value in settings.session.items():
        options.add_session_config_entry(key, value)
    for stated in settings.operator_libraries:
        _register(options, stated)
    if source.operators is not None:
        options.register_custom_ops_library(source.operators)
    if isinstance(source.model, bytes) and source.folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", source.folder)
    return options


def _register(options: Any, stated: str) -> None:
    path = operator_library(stated)
    key = f"execution.provider_options.onnxruntime.{OPERATOR_LIBRARIES}"
    if path is None:
        fix = f"pip install {EXTENSIONS}" if stated == EXTENSIONS else f"correct the path in {key}"
        raise EngineUnavailable(f"there is no library of operators {stated!r}", fix=fix, engine="onnxruntime")
    try:
        options.register_custom_ops_library(path)
    except Exception as error:  # of a class that is not importable everywhere
        msg = f"ONNX Runtime cannot take {path} as a library of operators: {error}"
        fix = f"name a library in {key} that exports RegisterCustomOps and fits this ONNX Runtime"
        raise EngineError(msg, fix=fix, engine="onnxruntime") from None


def open_session(settings: OnnxRuntimeSettings, source: ModelSource, device: str, options: Any = None) -> Opened:
    """Open a session that runs on the requested device, or raise."""
    _check_processors(settings, device)
    if options is None:
        options = session_options(settings, source)
        options.add_session_config_entry(_ASSIGNMENT, "1")
    if source.changed:
        from xpuruntime.engines.onnxruntime.trial import refuse_crash

        refuse_crash(settings, source, LEVELS[settings.level], device)
    cuda = settings.provider != "CPUExecutionProvider"
    if cuda and not settings.allow_cpu_ops:
        options.add_session_config_entry(NO_CPU, "1")
    try:
        session = _construct(settings, source, options)
    except Exception as error:
        if cuda and "fallback to CPU EP has been explicitly disabled" in str(error):
            raise _islands(settings, source, device) from None
        raise translate(error, doing=f"loading {source.label}", device=device) from None
    if session.get_providers()[0] != settings.provider:
        raise _absent(session, settings, device)
    placements = assignment(session)
    if cuda and settings.allow_cpu_ops and placements is None:
        msg = "this ONNX Runtime cannot say which node runs where, so execution.allow_cpu_ops cannot be enforced"
        raise EngineError(msg, fix='pip install "onnxruntime-gpu>=1.24"', engine="onnxruntime", device=device)
    if cuda and placements is not None:
        strays = [p for p in placements if p.provider != settings.provider and p.op not in settings.allow_cpu_ops]
        if strays:
            raise _refusal(strays, settings, device)
    return Opened(session, placements)


def assignment(session: Any) -> list[Assigned] | None:
    """Return which provider each node was given to, before fusion."""
    read = getattr(session, "get_provider_graph_assignment_info", None)
    if read is None:
        return None
    try:
        return [
            Assigned(str(part.ep_name), str(node.name), str(node.op_type), str(node.domain))
            for part in read()
            for node in part.get_nodes()
        ]
    except Exception:  # the binding raises its own types, which are not importable everywhere
        return None


def _check_processors(settings: OnnxRuntimeSettings, device: str) -> None:
    """Refuse affinities with processors that this process cannot use: ONNX Runtime logs it, and binds no thread."""
    text = settings.session.get(AFFINITIES)
    if text is None:
        return
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    for part in text.replace(";", ",").split(","):
        first, _, last = part.partition("-")
        wrong = sorted({*range(int(first), int(last or first) + 1)} - {processor + 1 for processor in usable})
        if wrong or not int(first) <= int(last or first):
            have = ", ".join(str(processor + 1) for processor in sorted(usable))
            msg = f"{AFFINITIES}: {part} is no processor that this process can use; it can use {have}"
            raise EngineError(msg, fix="name some of these", engine="onnxruntime", device=device)


def _construct(settings: OnnxRuntimeSettings, source: ModelSource, options: Any) -> Any:
    import onnxruntime as ort

    # Each CUDA session logs a warning that it has no plugin device; errors still reach the log, and us as exceptions.
    ort.set_default_logger_severity(_ERROR)
    try:
        return ort.InferenceSession(
            source.model,
            options,
            providers=[(settings.provider, dict(settings.options))],
            enable_fallback=0,
            read_config_from_model=0,
        )
    finally:
        ort.set_default_logger_severity(_WARNING)


def _islands(settings: OnnxRuntimeSettings, source: ModelSource, device: str) -> Exception:
    """Open once more with the CPU provider allowed, only to name the nodes that it would take."""
    options = session_options(settings, source)
    options.add_session_config_entry(_ASSIGNMENT, "1")
    try:
        session = _construct(settings, source, options)
    except Exception as error:
        return translate(error, doing=f"loading {source.label}", device=device)
    if session.get_providers()[0] != settings.provider:
        return _absent(session, settings, device)
    placements = assignment(session) or ()
    return _refusal([p for p in placements if p.provider != settings.provider], settings, device)


def _absent(session: Any, settings: OnnxRuntimeSettings, device: str) -> EngineError:
    msg = (
        f"asked for {settings.provider}, but ONNX Runtime opened the session on "
        f"{', '.join(session.get_providers())}; its library could not be loaded: run `xrt doctor`"
    )
    return EngineUnavailable(msg, engine="onnxruntime", device=device)


def _refusal(strays: list[Assigned], settings: OnnxRuntimeSettings, device: str) -> UnsupportedOperationError:
    ops = sorted({p.op for p in strays})
    named = ", ".join(f"{p.name} ({p.op})" for p in strays[:8])
    rest = f" and {len(strays) - 8} more" if len(strays) > 8 else ""
    msg = (
        f"{len(strays)} node(s) would run on the CPU provider although {device} was asked for: {named}{rest}. "
        f"{settings.provider} has no kernel for them as they stand. To accept it, state "
        f"execution.allow_cpu_ops: [{', '.join(ops)}]"
    )
    return UnsupportedOperationError(msg, engine="onnxruntime", device=device)


_OUT_OF_MEMORY = (
    r"(?i)Failed to allocate memory|p != nullptr was false|Available memory of|bad[_ ]alloc|out of memory"
    r"|CUDA failure 2:|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_OTHER_SIZE = (
    r"OrtValue provided for output '(.*?)' of node .* has shape \{(.*?)\} but the computed output shape .* is \{(.*?)\}"
)
_NOISE = r"/onnxruntime_src/\S+\s+(?:static |virtual )?[^\n]*?\)(?: const)?(?: \[with [^\]]*\])? "


def translate(error: BaseException, *, doing: str, device: str, hint: str = "") -> XpuRuntimeError:
    """Return `error` as an xpuruntime error."""
    text = re.sub(_NOISE, "", str(error)).replace("[ONNXRuntimeError] : ", "").strip()
    code = type(error).__name__
    message = f"{doing} on {device} failed in ONNX Runtime: {text}" + (f" {hint}" if hint else "")
    known = {"engine": "onnxruntime", "device": device, "status": code}
    if isinstance(error, MemoryError) or re.search(_OUT_OF_MEMORY, str(error)):
        fix = "Use a smaller batch, a larger execution.memory.limit, or free other sessions; this session still works."
        return OutOfMemoryError(f"{message} {fix}", **known)
    other_size = re.search(_OTHER_SIZE, text)
    if other_size:
        name, bound, size = other_size.groups()
        changed = (
            f"output {name!r} changed its shape from [{bound}] to [{size}]: it depends on the values of the inputs, so "
            "it has no fixed buffer; use run()"
        )
        return InputError(changed, **known)
    if code == "InvalidArgument":
        return InputError(message, **known)
    if code == "NotImplemented":
        fix = "use an engine that has it (such as execution.engine: openvino), or export the model in float32"
        return UnsupportedOperationError(message, fix=None if hint else fix, **known)
    if code in ("InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NoModel", "ModelLoaded"):
        return ModelError(message, **known)
    if re.search(r"CUDA (?:failure|error)|CUDNN_STATUS|CUBLAS_STATUS", text):
        return CudaError(message, **known)
    return EngineFailed(message, **known)
