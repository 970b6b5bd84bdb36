# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The JSON Schemas of what reports and comparisons of reports are written as, made of the types themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from xpuruntime.codes import Code
from xpuruntime.evidence.report import SCHEMA, Report
from xpuruntime.evidence.report_comparison import COMPARISON_SCHEMA, ReportComparison

__all__ = ["comparison_schema", "report_schema", "schema_of"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SECTION = re.compile(r"\n\s*\n?(?:Attributes|Examples|Notes)\n\s*-+\n")


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of `Report.to_dict`."""
    added = {
        "headline": {"type": "string", "description": "The first line of the report, in words."},
        "honoured": {"type": "boolean", "description": "Whether no policy key deviates, and none is inconclusive."},
        "fallback": {
            "anyOf": [{"type": "string"}, {"type": "null"}],
            "description": "The candidate of execution.fallback that ran; null where none was needed.",
        },
    }
    return schema_of(Report, SCHEMA, "A report of xpuruntime", added)


def comparison_schema() -> dict[str, Any]:
    """Return the JSON Schema of `ReportComparison.to_dict`."""
    added = {
        "headline": {"type": "string", "description": "What differs, in one sentence."},
        "same": {"type": "boolean", "description": "Whether the same ran."},
    }
    return schema_of(ReportComparison, COMPARISON_SCHEMA, "A comparison of two reports of xpuruntime", added)


def schema_of(kind: type, version: str, title: str, added: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of what a type is written as."""
    (root,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    top = parts.pop(root["$ref"].rpartition("/")[2])
    _describe(top, kind)
    types = {one.__name__: one for one in _named_types(kind)}
    for name, part in parts.items():
        _describe(part, types[name])
    properties = {"schema": {"const": version}, **added}
    properties |= {name: one for name, one in top["properties"].items() if name != "schema"}
    return {
        "$schema": _DIALECT,
        "title": title,
        "description": top["description"],
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name in ("schema", *added, *top["required"])],
        "$defs": dict(sorted(parts.items())),
    }


def _describe(part: dict[str, Any], kind: type) -> None:
    """Take descriptions from the docstring, and require what is always written: defaults are, unset fields are not."""
    text = inspect.cleandoc(kind.__doc__ or "")
    part["description"] = " ".join(_SECTION.split("\n" + text)[0].split())
    if issubclass(kind, Code):
        part["enumDescriptions"] = [kind(word).meaning for word in part["enum"]]
        return
    told = _attributes(text)
    for name, one in part["properties"].items():
        one.pop("default", None)
        if name in told:
            one["description"] = told[name]
    if issubclass(kind, msgspec.Struct):  # keys of a typed dict may be left out
        unset = {one.encode_name for one in msgspec.structs.fields(kind) if one.default is msgspec.UNSET}
        part["required"] = [name for name in part["properties"] if name not in unset]


def _attributes(text: str) -> dict[str, str]:
    """Return what the section ``Attributes`` of a docstring says, by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, section = text.partition("Attributes\n----------\n")
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.partition(" : ")[0].split(",")]
        elif line.strip():
            for name in names:
                found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def _named_types(kind: type) -> set[type]:
    """Return all structs, typed dicts and enumerations that a type is made of."""
    found: set[type] = set()

    def look(info: Any) -> None:
        if isinstance(info, (msgspec.inspect.StructType, msgspec.inspect.TypedDictType)):
            if info.cls in found:
                return
            found.add(info.cls)
            for field in info.fields:
                look(field.type)
            return
        if isinstance(info, msgspec.inspect.EnumType):
            found.add(info.cls)
            return
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(info, name):
                look(getattr(info, name))
        for one in getattr(info, "types", ()) or getattr(info, "item_types", ()):
            look(one)

    look(msgspec.inspect.type_info(kind))
    return found
