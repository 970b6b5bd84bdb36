# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages of protobuf itself, in a pool of their own, to hold the codec against."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "protocol" / "inference_fields.txt"
_FIELD = re.compile(r"(oneof |repeated |)(\S+) (\w+) (\d+)")


def message_classes() -> dict[str, Any]:
    """Return the class of each message of `inference_fields.txt`, with the fields of inference.proto and Triton."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="inference_test.proto", package="inference", syntax="proto3")
    found: dict[str, Any] = {}
    fields: list[tuple[Any, str, str]] = []
    for line in TABLE.read_text().splitlines():
        kind, name, listed = re.fullmatch(r"(message|enum) ([\w.]+):(.*)", line).groups()
        owner, _, last = name.rpartition(".")
        if kind == "enum":
            made = (found[owner] if owner else file).enum_type.add(name=last)
            for word, number in re.findall(r"(\w+) (\d+)", listed):
                made.value.add(name=word, number=int(number))
        else:
            made = found[owner].nested_type.add(name=last) if owner else file.message_type.add(name=last)
            fields.append((made, name, listed))
        found[name] = made
    enums = {name for name, made in found.items() if hasattr(made, "value")}
    for made, name, listed in fields:
        for one in listed.split(", ") if listed.strip() else ():
            _add_field(made, name, *_FIELD.fullmatch(one.strip()).groups(), enums)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))
        for name in found
        if name not in enums
    }


def _add_field(made: Any, owner: str, label: str, kind: str, name: str, number: str, enums: set[str]) -> None:
    field = made.field.add(name=name, number=int(number), label=3 if label == "repeated " else 1)
    if label == "oneof ":
        if not made.oneof_decl:
            made.oneof_decl.add(name="choice")
        field.oneof_index = 0
    entry = re.fullmatch(r"map<(\w+);([\w.]+)>", kind)
    if entry is None:
        _set_kind(field, kind, enums)
        return
    title = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    inner = made.nested_type.add(name=title)
    inner.options.map_entry = True
    _set_kind(inner.field.add(name="key", number=1, label=1), entry[1], enums)
    _set_kind(inner.field.add(name="value", number=2, label=1), entry[2], enums)
    field.label = 3
    field.type, field.type_name = 11, f".inference.{owner}.{title}"


def _set_kind(field: Any, kind: str, enums: set[str]) -> None:
    simple = {
        "double": 1,
        "float": 2,
        "int64": 3,
        "uint64": 4,
        "int32": 5,
        "bool": 8,
        "string": 9,
        "bytes": 12,
        "uint32": 13,
    }
    if kind in simple:
        field.type = simple[kind]
    else:
        field.type, field.type_name = 14 if kind in enums else 11, f".inference.{kind}"
