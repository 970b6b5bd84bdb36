# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX Runtime's errors as exceptions of xpuruntime."""

from __future__ import annotations

import re

from xpuruntime.errors import (
    CudaError,
    EngineFailed,
    InputError,
    ModelError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)

__all__ = ["translate"]

_OUT_OF_MEMORY = re.compile(
    r"Failed to allocate memory|p != nullptr was false|Available memory of|bad[_ ]alloc|out of memory"
    r"|CUDA failure 2:|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_OTHER_SIZE = re.compile(
    r"OrtValue provided for output '(.*?)' of node .* has shape \{(.*?)\} but the computed output shape .* is \{(.*?)\}"
)
_NOISE = re.compile(r"/onnxruntime_src/\S+\s+(?:static |virtual )?[^\n]*?\)(?: const)?(?: \[with [^\]]*\])? ")


def translate(error: BaseException, *, doing: str, device: str, hint: str = "") -> XpuRuntimeError:
    """Return `error` as an xpuruntime error."""
    text = _NOISE.sub("", str(error)).replace("[ONNXRuntimeError] : ", "").strip()
    code = type(error).__name__
    message = f"{doing} on {device} failed in ONNX Runtime: {text}" + (f" {hint}" if hint else "")
    known = {"engine": "onnxruntime", "device": device, "status": code}
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        fix = "Use a smaller batch, a larger execution.memory.limit, or free other sessions; this session still works."
        return OutOfMemoryError(f"{message} {fix}", **known)
    other_size = _OTHER_SIZE.search(text)
    if other_size:
        name, bound, made = other_size.groups()
        changed = (
            f"output {name!r} changed its shape from [{bound}] to [{made}]: it depends on the values of the inputs, so "
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
