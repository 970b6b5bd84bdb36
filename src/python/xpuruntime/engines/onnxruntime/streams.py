# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The caller's CUDA stream, asked from the framework the caller already uses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.engines.arrays import Kind

__all__ = ["caller_stream", "stream_owner", "torch_stream"]


def caller_stream(stream: Any, kind: Kind, index: int) -> int:
    """Return the handle of the stream the caller works on.

    Parameters
    ----------
    stream : None, int, or a stream object
        ``None`` asks torch or CuPy, where the arrays are theirs; for others it is the legacy default stream (0). An
        int is a ``cudaStream_t``. Objects are those of torch (``cuda_stream``), CuPy (``ptr``), this library
        (``handle``) and anything with ``__cuda_stream__``.
    kind : str
        Kind of the arrays.
    index : int
        CUDA device index.

    Raises
    ------
    InputError
        If `stream` is none of these.
    """
    if stream is None:
        if kind == "torch":
            return torch_stream(index)
        if kind == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    msg = f"stream= is a {type(stream).__name__}; pass a torch, CuPy or xpuruntime stream, or a cudaStream_t as an int"
    raise InputError(msg)


def stream_owner(stream: Any, kind: Kind) -> Any:
    """Return the object that keeps the caller's stream alive, where there is one."""
    if stream is None and kind == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream()
    return None if isinstance(stream, int) else stream


def torch_stream(index: int) -> int:
    """Return the handle of torch's current stream on CUDA device `index`."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # ten times faster than making a Stream object
    return int(torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index))
