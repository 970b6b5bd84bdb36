# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages by a table of their fields, to and from the dictionaries that JSON has for them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.serving.protocol.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    fields_of,
    malformed,
    packed_array,
    packed_varints,
    signed,
    text_of,
    varint,
    varints_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from xpuruntime.serving.protocol.items import Items

__all__ = ["Enum", "Field", "Message", "decode", "encode"]

_NUMBERS = {"bool", "int32", "int64", "uint32", "uint64"}
_FLOATS = {"float": ("<f4", FIXED32), "double": ("<f8", FIXED64)}


class Enum(dict[str, int]):
    """An enumeration: its words and their numbers."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message.

    Parameters
    ----------
    number : int
    kind : str, Message or Enum
        ``"string"``, ``"bytes"``, ``"bool"``, ``"int64"``, ``"float"``, ...; a message; an enumeration.
    repeated : bool
    key : str
        For a map, the kind of its keys; `kind` is that of the values.
    oneof : bool
        Whether its presence says something, so that also a default value is written.
    """

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

    Raises
    ------
    ServingError
        The message is malformed, has too many items, or a field has another wire type than its own.
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
