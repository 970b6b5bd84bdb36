# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Wire format of protocol buffers, without the protobuf package: fields, varints, arrays, messages by their fields.

Two packages that register the same messages in protobuf cannot be in one process, and a server must not decide which
clients can be imported beside it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from xpuruntime.serving.protocol.datatypes import Items

__all__ = [
    "FIXED32",
    "FIXED64",
    "LENGTH",
    "VARINT",
    "Enum",
    "Field",
    "Message",
    "decode",
    "encode",
    "fields_of",
    "malformed",
    "packed_array",
    "packed_varints",
    "signed",
    "text_of",
    "varint",
    "varint_list",
    "varints_of",
]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
#: Bytes of a packed field that are read one by one.
_FEW = 64
#: Bytes of a packed field that are read all at once: each takes forty more meanwhile.
_AT_ONCE = 1 << 20
_MASK64 = (1 << 64) - 1
_FIXED32, _FIXED64 = struct.Struct("<I"), struct.Struct("<Q")


def malformed(reason: str) -> ServingError:
    """Return the error of a message that is none."""
    return ServingError(
        Status.INVALID_ARGUMENT, f"the message is malformed: {reason}. Fix: send a message of inference.proto"
    )


def fields_of(message: memoryview, items: Items | None = None) -> list[tuple[int, int, Any]]:
    """Return number, wire type and value of each field of a message, in order, and count them as items.

    Values are integers for varints (0 to 2⁶⁴-1) and fixed fields, and views for what has a length.
    """
    found: list[tuple[int, int, Any]] = []
    at, end = 0, len(message)
    most = end if items is None else items.left
    value: Any
    while at < end:
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
        found.append((number, kind, value))
        if len(found) > most:
            break
    if items is not None:
        items.take(len(found))
    return found


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
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def varint_list(packed: memoryview) -> list[int]:
    """Return the varints in a packed field one by one, which is quicker for a few, such as a shape."""
    found = []
    at, end = 0, len(packed)
    while at < end:
        if packed[at] < 128:
            found.append(packed[at])
            at += 1
        else:
            value, at = _varint_at(packed, at, end)
            found.append(value)
    return found


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
    for place in range(longest):
        has = lengths > place
        part = (octets[starts[has] + place] & 127).astype(np.uint64)
        values[has] |= part << np.uint64(7 * place)  # what is beyond 64 bits falls off, as in protobuf
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
    more = np.zeros_like(octets, bool)
    more[:, :-1] = parts[:, 1:] > 0
    octets[more] |= 128
    used = np.ones_like(more)
    used[:, 1:] = parts[:, 1:] > 0
    return bytes(octets[used])


def packed_array(packed: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements of a packed field of ``float`` or ``double``."""
    kind = np.dtype(dtype)
    if len(packed) % kind.itemsize:
        raise malformed(f"a packed field has {len(packed)} bytes, and its elements take {kind.itemsize} each")
    return np.frombuffer(packed, kind)


_NUMBERS = {"bool", "int32", "int64", "uint32", "uint64"}
_FLOATS = {"float": ("<f4", FIXED32), "double": ("<f8", FIXED64)}


class Enum(dict[str, int]):
    """An enumeration: its words and their numbers."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message."""

    number: int
    kind: str | Message | Enum
    repeated: bool = False
    key: str = ""
    oneof: bool = False


class Message(dict[str, Field]):
    """A message: its fields by name."""

    def entry(self, field: Field) -> Message:
        """Return the message of an entry of a map."""
        return Message(key=Field(1, field.key), value=Field(2, field.kind))


def encode(message: Message, value: Mapping[str, Any]) -> bytes:
    """Return a dictionary as the message that it is: keys that the message has not are left out, as are defaults."""
    parts: list[bytes] = []
    for name, one in value.items():
        field = message.get(name)
        if field is None or one is None:
            continue
        if field.key:
            for key, item in one.items():
                entry = message.entry(field)
                _put(parts, field.number, encode(entry, {"key": key, "value": item}))
        elif not field.repeated:
            _write(parts, field, one, always=field.oneof)
        elif isinstance(field.kind, Message) or field.kind in ("string", "bytes"):
            for item in one:
                _write(parts, field, item, always=True)
        elif len(one):
            _put(parts, field.number, _packed(field.kind, one))
    return b"".join(parts)


def _put(parts: list[bytes], number: int, data: bytes) -> None:
    parts += (varint(number << 3 | LENGTH), varint(len(data)), data)


def _write(parts: list[bytes], field: Field, value: Any, *, always: bool) -> None:
    kind = field.kind
    if isinstance(kind, Message):
        _put(parts, field.number, encode(kind, value))
    elif not value and not always and not isinstance(value, float):
        return
    elif isinstance(kind, Enum):
        number = kind[value] if isinstance(value, str) else int(value)
        if number or always:
            parts += (varint(field.number << 3 | VARINT), varint(number))
    elif kind == "string":
        _put(parts, field.number, str(value).encode())
    elif kind == "bytes":
        _put(parts, field.number, bytes(value))
    elif kind in _NUMBERS:
        parts += (varint(field.number << 3 | VARINT), varint(int(value)))
    else:
        form, wire = ("<f", FIXED32) if kind == "float" else ("<d", FIXED64)
        packed = struct.pack(form, value)
        if any(packed) or always:
            parts += (varint(field.number << 3 | wire), packed)


def _packed(kind: str | Enum, values: Sequence[Any]) -> bytes:
    if isinstance(kind, Enum):
        values = [kind[one] if isinstance(one, str) else one for one in values]
        return varints_of(np.asarray(values, np.int64))
    if kind in _FLOATS:
        return np.asarray(values, _FLOATS[kind][0]).tobytes()
    return varints_of(np.asarray(values, np.uint64 if kind.startswith("uint") or kind == "bool" else np.int64))


def decode(message: Message, data: memoryview, items: Items | None = None) -> dict[str, Any]:
    """Return a message as a dictionary, which has only the fields that were sent.

    Unknown fields are passed over, as protobuf does; a field that comes again replaces or extends the former.
    """
    numbers = {field.number: (name, field) for name, field in message.items()}
    found: dict[str, Any] = {}
    for number, wire, value in fields_of(data, items):
        known = numbers.get(number)
        if known is None:
            continue
        name, field = known
        if field.key:
            _need(wire == LENGTH, name)
            entry = decode(message.entry(field), value, items)
            default = {} if isinstance(field.kind, Message) else _default(field.kind)
            found.setdefault(name, {})[entry.get("key", _default(field.key))] = entry.get("value", default)
        elif isinstance(field.kind, Message):
            _need(wire == LENGTH, name)
            inner = decode(field.kind, value, items)
            if field.repeated:
                found.setdefault(name, []).append(inner)
            else:
                _drop_others(message, field, found, name)
                found[name] = _merged(found.get(name), inner)
        elif field.repeated and wire == LENGTH and field.kind not in ("string", "bytes"):
            found.setdefault(name, []).extend(_unpacked(field.kind, value).tolist())
        elif field.repeated:
            found.setdefault(name, []).append(_read(field.kind, wire, value, name))
        else:
            _drop_others(message, field, found, name)
            found[name] = _read(field.kind, wire, value, name)
    return found


def _drop_others(message: Message, field: Field, found: dict[str, Any], name: str) -> None:
    """Of a oneof the last field that was sent holds."""
    if field.oneof:
        for other, one in message.items():
            if one.oneof and other != name:
                found.pop(other, None)


def _merged(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """Return a message that was sent in two parts."""
    if not before:
        return after
    merged = dict(before)
    for name, value in after.items():
        old = merged.get(name)
        if isinstance(old, list):
            merged[name] = old + value
        else:
            merged[name] = _merged(old, value) if isinstance(old, dict) else value
    return merged


def _default(kind: str | Message | Enum) -> Any:
    if kind == "string":
        return ""
    return b"" if kind == "bytes" else False if kind == "bool" else 0


def _need(right: bool, name: str) -> None:
    if not right:
        raise malformed(f"the field {name} has a wire type that is not its own")


def _read(kind: str | Enum, wire: int, value: Any, name: str) -> Any:
    if kind == "string" or kind == "bytes":
        _need(wire == LENGTH, name)
        return text_of(value) if kind == "string" else bytes(value)
    if isinstance(kind, Enum):
        _need(wire == VARINT, name)
        number = signed(value, 32)
        return next((word for word, one in kind.items() if one == number), number)
    if kind in _FLOATS:
        form, own = _FLOATS[kind]
        _need(wire == own, name)
        return float(np.array(value, "<u4" if kind == "float" else "<u8").view(form))
    _need(wire == VARINT, name)
    return _number(kind, value)


def _number(kind: str, value: int) -> Any:
    if kind == "bool":
        return value != 0
    bits = 32 if kind.endswith("32") else 64
    return value & (1 << bits) - 1 if kind.startswith("u") else signed(value, bits)


def _unpacked(kind: str | Enum, packed: memoryview) -> NDArray[Any]:
    if isinstance(kind, str) and kind in _FLOATS:
        return packed_array(packed, _FLOATS[kind][0])
    values = packed_varints(packed)
    if kind == "bool":
        return values.astype(np.bool_)
    if kind == "uint64":
        return values
    if kind == "uint32":
        return values.astype(np.uint32)
    return values.astype(np.int64) if kind == "int64" else values.astype(np.uint32).view(np.int32)
