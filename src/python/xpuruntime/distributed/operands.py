# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of the arrays of a collective, all on this rank alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime._core import ArrayView, Stream
from xpuruntime.distributed.nccl import DTYPES, OPS, version_text
from xpuruntime.errors import InputError, UnsupportedOperationError

if TYPE_CHECKING:
    from xpuruntime.distributed.nccl import NcclLibrary

__all__ = [
    "input_view",
    "moved_type",
    "output_view",
    "reduced_type",
    "reduction",
    "require_apart",
    "require_writable",
    "resolve_stream",
]


def input_view(array: Any, name: str, device: str) -> ArrayView:
    """Return an array of `device` that NCCL can read in one piece. Raises `InputError` naming the fix."""
    view = ArrayView(array, name)
    if view.device != device:
        raise InputError(
            f"'{name}' is on {view.device}, and this communicator is on {device}. Fix: move it there, or make the "
            "communicator with device= of the array"
        )
    if not view.is_contiguous:
        raise InputError(
            f"'{name}' {list(view.shape)} is not contiguous, and NCCL moves memory in one piece. Fix: pass "
            f"{name}.contiguous(), or a copy of it"
        )
    return view


def output_view(array: Any, name: str, like: ArrayView, shapes: tuple[tuple[int, ...], ...]) -> ArrayView:
    """Return an array to write, of the device and dtype of `like` and one of these shapes. Raises `InputError`."""
    view = input_view(array, name, like.device)
    if view.dtype != like.dtype:
        raise InputError(f"'{name}' is {view.dtype}, and the result is {like.dtype}. Fix: pass one of that dtype")
    if view.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise InputError(f"'{name}' has shape {list(view.shape)}, and the result has {allowed}. Fix: pass that shape")
    return require_writable(view, name)


def require_writable(view: ArrayView, name: str) -> ArrayView:
    """Return `view`. Raises `InputError` for read-only memory."""
    if view.readonly:
        raise InputError(f"'{name}' is read-only, and NCCL would write to it. Fix: pass a copy")
    return view


def require_apart(x: ArrayView, out: ArrayView, offset: int | None) -> None:
    """Refuse arrays that share memory in a way that NCCL cannot work in place."""
    start, end = x.data_ptr, x.data_ptr + x.size * x.itemsize
    out_start, out_end = out.data_ptr, out.data_ptr + out.size * out.itemsize
    if start < out_end and out_start < end and (offset is None or start - out_start != offset):
        raise InputError(
            "'out' shares memory with 'x' at another place than where the result belongs. Fix: pass memory of its own, "
            "or leave out= away"
        )


def reduction(op: str) -> int:
    """Return NCCL's number of an operation. Raises `InputError`."""
    number = OPS.get(op) if isinstance(op, str) else None
    if number is None:
        raise InputError(f"op is {op!r}; expected one of {', '.join(OPS)}")
    return number


def reduced_type(view: ArrayView, op: str, library: NcclLibrary) -> int:
    """Return NCCL's number of the dtype of an array to reduce."""
    dtype = view.dtype
    if dtype == "bool":
        if op in ("max", "min"):
            return DTYPES["uint8"][0]
        raise UnsupportedOperationError(
            f"'x' is bool, and a {op} of it is no bool. Fix: op='max' is or, op='min' is and; or convert it"
        )
    known = DTYPES.get(dtype)
    if known is None:
        raise UnsupportedOperationError(
            f"'x' is {dtype}, which NCCL cannot reduce. Fix: convert it to one of {', '.join(DTYPES)}"
        )
    number, since = known
    if not library.has(*since):
        raise UnsupportedOperationError(
            f"'x' is {dtype}, which NCCL has since {version_text(since)}, and {library.path} is "
            f"{version_text(library.version)}. Fix: install a newer NCCL, or convert it"
        )
    return number


def moved_type(view: ArrayView, library: NcclLibrary) -> tuple[int, int]:
    """Return NCCL's number of a dtype that is only moved, and into how many of these an element goes.

    What NCCL has no name for is moved as bytes.
    """
    known = DTYPES.get(view.dtype)
    if known is not None and library.has(*known[1]):
        return known[0], 1
    return DTYPES["uint8"][0], view.itemsize


def resolve_stream(views: tuple[ArrayView, ...], stream: Any, device: str) -> tuple[Stream, bool]:
    """Return the stream of a call, and whether the arrays have to be ordered around it.

    Without a stream given, it is the current stream of the library of the first array that has one, else the device's
    default stream.
    """
    if stream is not None:
        given = stream if isinstance(stream, Stream) else Stream.wrap(device, stream)
        if given.device != device:
            raise InputError(f"stream is on {given.device}, and the arrays are on {device}. Fix: pass a stream of it")
        return given, True
    for view in views:
        current = view.current_stream
        if current is not None:
            alone = all(view.same_library(other) for other in views)
            return Stream.wrap(device, current), not alone
    return Stream.default(device), True
