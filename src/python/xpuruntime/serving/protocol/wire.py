# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Wire format of protocol buffers: fields, varints and arrays as views of a message, with a bound for each."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.serving.messages import ServingError, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xpuruntime.serving.protocol.datatypes import Items

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
#: Bytes of a packed field that are read one by one.
_FEW = 64
#: Bytes of a packed field that are read all at once: each takes forty more meanwhile, and nothing else runs.
_AT_ONCE = 64 << 10
_MASK64 = (1 << 64) - 1
_FIXED32, _FIXED64 = struct.Struct("<I"), struct.Struct("<Q")


def malformed(reason: str) -> ServingError:
    """Return the error of a message that is none."""
    return ServingError(
        Status.INVALID_ARGUMENT, f"the message is malformed: {reason}. Fix: send a message of inference.proto"
    )


def fields_of(message: memoryview, items: Items | None = None, *, weight: int = 1) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a message, in order, and count each as `weight` items.

    Values are integers for varints (0 to 2⁶⁴-1) and fixed fields, and views for what has a length.
    """
    at, end = 0, len(message)
    value: Any
    while at < end:
        if items is not None:
            items.take(weight)
        tag = message[at]
        at += 1
        if tag > 127:
            tag, at = _varint_at(message, at - 1, end)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise malformed(f"a field has the number {number}")
        if kind == LENGTH:
            if at < end and message[at] < 128:
                length = message[at]
                at += 1
            else:
                length, at = _varint_at(message, at, end)
            if length > end - at:
                raise malformed(f"field {number} states {length} bytes, and {end - at} are left")
            value = message[at : at + length]
            at += length
        elif kind == VARINT:
            value, at = _varint_at(message, at, end)
        elif kind in (FIXED32, FIXED64):
            form = _FIXED32 if kind == FIXED32 else _FIXED64
            if form.size > end - at:
                raise malformed(f"field {number} takes {form.size} bytes, and {end - at} are left")
            (value,) = form.unpack_from(message, at)
            at += form.size
        else:
            raise malformed(f"field {number} has the wire type {kind}")
        yield number, kind, value


def _varint_at(message: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end:
            raise malformed("it ends within a number")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _MASK64, at
        shift += 7
        if shift > 63:
            raise malformed("a number is longer than ten bytes")


def signed(value: int, bits: int = 64) -> int:
    """Return a varint as the two's complement of so many low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def text_of(value: memoryview) -> str:
    """Return a string, which must be UTF-8."""
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise malformed("a string is not UTF-8") from None


def varint(value: int) -> bytes:
    """Return an integer as a varint; negative ones as 64 bits of two's complement."""
    value &= _MASK64
    if value < 128:
        return bytes((value,))
    octets = bytearray()
    while value > 127:
        octets.append(value & 127 | 128)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def varint_list(packed: memoryview) -> list[int]:
    """Return the varints in a packed field one by one, which is quicker for a few, such as a shape."""
    numbers = []
    at, end = 0, len(packed)
    while at < end:
        if packed[at] < 128:
            numbers.append(packed[at])
            at += 1
        else:
            value, at = _varint_at(packed, at, end)
            numbers.append(value)
    return numbers


def packed_varints(packed: memoryview) -> NDArray[np.uint64]:
    """Return the varints in a packed field."""
    if len(packed) <= _FEW:
        return np.array(varint_list(packed), np.uint64)
    pieces = []
    at = 0
    while at < len(packed):
        end = min(at + _AT_ONCE, len(packed))
        while end < min(at + _AT_ONCE + 10, len(packed)) and packed[end - 1] > 127:
            end += 1
        pieces.append(_varints_at_once(packed[at:end]))
        at = end
    return np.concatenate(pieces)


def _varints_at_once(packed: memoryview) -> NDArray[np.uint64]:
    octets = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(octets < 128)
    if not ends.size or int(ends[-1]) != octets.size - 1:
        raise malformed("a packed field ends within a number")
    starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10:
        raise malformed("a number is longer than ten bytes")
    values = np.zeros(ends.size, np.uint64)
    for index in range(longest):
        has = lengths > index
        part = (octets[starts[has] + index] & 127).astype(np.uint64)
        values[has] |= part << np.uint64(7 * index)  # what is beyond 64 bits falls off, as in protobuf
    return values


def varints_of(array: NDArray[Any]) -> bytes:
    """Return integers or booleans as packed varints; negative ones as 64 bits of two's complement."""
    if array.dtype.kind == "i":
        values = array.astype(np.int64).ravel().view(np.uint64)
    else:
        values = array.astype(np.uint64).ravel()
    if not values.size:
        return b""
    if int(values.max()) < 128:
        return values.astype(np.uint8).tobytes()
    places = np.arange(10, dtype=np.uint64)
    parts = values[:, None] >> (places * np.uint64(7))
    octets = (parts & np.uint64(127)).astype(np.uint8)
    continued = np.zeros_like(octets, bool)
    continued[:, :-1] = parts[:, 1:] > 0
    octets[continued] |= 128
    used = np.ones_like(continued)
    used[:, 1:] = parts[:, 1:] > 0
    return bytes(octets[used])


def packed_array(packed: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements of a packed field of ``float`` or ``double``."""
    kind = np.dtype(dtype)
    if len(packed) % kind.itemsize:
        raise malformed(f"a packed field has {len(packed)} bytes, and its elements take {kind.itemsize} each")
    return np.frombuffer(packed, kind)
