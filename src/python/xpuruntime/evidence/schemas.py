# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`schema_of`: the JSON Schema of a type that is written as JSON, made of the type itself."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints

import msgspec

from xpuruntime.codes import Code

__all__ = ["schema_of"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SECTION = re.compile(r"\n\s*\n?(?:Attributes|Examples|Notes)\n\s*-+\n")


def schema_of(kind: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Return the JSON Schema of what a type is written as; properties that its JSON states are told by their own."""
    (root,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    top = parts.pop(root["$ref"].rpartition("/")[2])
    _describe(top, kind)
    types = {type_.__name__: type_ for type_ in _named_types(kind)}
    for name, part in parts.items():
        _describe(part, types[name])
    stated = {name: _property_schema(getattr(kind, name)) for name in getattr(kind, "STATED", ())}
    versions = {field.name: field.default for field in msgspec.structs.fields(kind)}
    properties = {"schema": {"const": versions["schema"]}, **stated}
    properties |= {name: property_ for name, property_ in top["properties"].items() if name != "schema"}
    return {
        "$schema": _DIALECT,
        "title": title,
        "description": top["description"],
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name in ("schema", *stated, *top["required"])],
        "$defs": dict(sorted(parts.items())),
    }


def _property_schema(stated: property) -> dict[str, Any]:
    returned = get_type_hints(stated.fget)["return"]
    summary = inspect.cleandoc(stated.__doc__ or "").partition("\n\n")[0]
    return {**msgspec.json.schema(returned), "description": " ".join(summary.split())}


def _describe(part: dict[str, Any], kind: type) -> None:
    """Take descriptions from the docstring, and require what is always written: defaults are, unset fields are not."""
    text = inspect.cleandoc(kind.__doc__ or "")
    part["description"] = " ".join(_SECTION.split("\n" + text)[0].split())
    if issubclass(kind, Code):
        part["enumDescriptions"] = [kind(word).meaning for word in part["enum"]]
        return
    told = _attributes(text)
    for name, member in part["properties"].items():
        member.pop("default", None)
        member.pop("propertyNames", None)  # which msgspec states since 0.23
        if name in told:
            member["description"] = told[name]
    if issubclass(kind, msgspec.Struct):  # keys of a typed dict may be left out
        unset = {field.encode_name for field in msgspec.structs.fields(kind) if field.default is msgspec.UNSET}
        part["required"] = [name for name in part["properties"] if name not in unset]


def _attributes(text: str) -> dict[str, str]:
    """Return what the section ``Attributes`` of a docstring says, by name."""
    attributes: dict[str, str] = {}
    names: list[str] = []
    _, _, section = text.partition("Attributes\n----------\n")
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.partition(" : ")[0].split(",")]
        elif line.strip():
            for name in names:
                attributes[name] = f"{attributes.get(name, '')} {line.strip()}".strip()
    return attributes


def _named_types(kind: type) -> set[type]:
    """Return all structs, typed dicts and enumerations that a type is made of."""
    types: set[type] = set()

    def look(info: Any) -> None:
        if isinstance(info, (msgspec.inspect.StructType, msgspec.inspect.TypedDictType)):
            if info.cls in types:
                return
            types.add(info.cls)
            for field in info.fields:
                look(field.type)
            return
        if isinstance(info, msgspec.inspect.EnumType):
            types.add(info.cls)
            return
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(info, name):
                look(getattr(info, name))
        for member in getattr(info, "types", ()) or getattr(info, "item_types", ()):
            look(member)

    look(msgspec.inspect.type_info(kind))
    return types
