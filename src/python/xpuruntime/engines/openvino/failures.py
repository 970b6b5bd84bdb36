# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""OpenVINO's errors as exceptions of xpuruntime."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xpuruntime.errors import (
    EngineError,
    EngineFailed,
    ModelError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.model import NodeInfo

__all__ = ["translate"]

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
    """Return operators as OpenVINO lists them, such as ``"Det-17"``, with the nodes of the model that have them."""
    ops = {one.strip().rpartition(".")[2].partition("-")[0] for one in listed.split(",")}
    found = [node.name for node in nodes if node.op in ops]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return listed.strip() + (f" (node {', '.join(map(repr, found[:4]))}{more})" if found else "")
