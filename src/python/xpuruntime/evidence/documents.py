# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Document`: a record that is printed, shown, written as JSON with a schema, and sampled at checkpoints."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec

from xpuruntime.codes import Code
from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, json_text
from xpuruntime.files.writing import write_whole
from xpuruntime.printable import printable
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    import os
    from pathlib import Path


class Document(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """A record with a field `schema`, which tables show and JSON has as a whole.

    `NOUN` names it in messages; `STATED` are the properties that its JSON has beside its fields, `TABLE` the field that
    is its table.
    """

    NOUN: ClassVar[str] = "the result"
    STATED: ClassVar[tuple[str, ...]] = ()
    TABLE: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, with properties such as `headline` in them."""
        plain: dict[str, Any] = msgspec.json.decode(json_bytes(self))
        for name in self.__struct_fields__:
            if isinstance(part := getattr(self, name), Document):
                plain[name] = part.to_dict()
        stated = {name: getattr(self, name) for name in self.STATED}
        return {"schema": plain.pop("schema"), **stated, **plain}

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON. A crash or a full disk leaves the old file, or none.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        return write_whole(path, self.to_json() + "\n", self.NOUN)

    def records(self, table: str = "") -> list[dict[str, Any]]:
        """Return a table of the record, such as ``"units"`` of a report, as flat rows of text, numbers and ``None``.

        Fields of parts get names with a dot, such as ``"time.value"``; a list of texts is one text with ``"; "``
        between, and a list of parts is JSON.

        Parameters
        ----------
        table : str
            A field with a row for each part. Default: ``"units"`` of a report, ``"claims"`` of a verification.

        Raises
        ------
        InputError
            There is no such table.
        """
        name, columns = table or self.TABLE, self._tables()
        if name not in columns:
            raise InputError(f"{self.NOUN} has no table {name!r}. Fix: give one of {', '.join(columns)}")
        parts: list[dict[str, Any]] = msgspec.json.decode(json_bytes(getattr(self, name)))
        rows = [dict(_flat(part)) for part in parts]
        # A part that one row has and another lacks has its columns, and none for itself.
        lacking = {column.rpartition(".")[0] for row in rows for column in row} - {""}
        return [{column: value for column, value in row.items() if column not in lacking} for row in rows]

    def to_pandas(self, table: str = "") -> Any:
        """Return a table of the record, as `records` does, as a ``pandas.DataFrame``. Needs pandas.

        Raises
        ------
        InputError
            There is no such table, or pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise InputError("pandas is not installed. Fix: `pip install pandas`, or use save_csv") from error

        rows = self.records(table)
        return pd.DataFrame(rows, columns=None if rows else self._tables()[table or self.TABLE])

    def save_csv(self, path: str | os.PathLike[str], table: str = "") -> Path:
        """Write a table of the record, as `records` has it, as CSV (RFC 4180, UTF-8) with the names of columns first.

        Raises
        ------
        InputError
            There is no such table, or the file cannot be written.
        """
        rows, text = self.records(table), io.StringIO()
        columns = list(dict.fromkeys(name for row in rows for name in row)) or self._tables()[table or self.TABLE]
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(
            {name: printable(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in rows
        )
        return write_whole(path, text.getvalue(), f"{self.NOUN} as CSV")

    @classmethod
    def _tables(cls) -> dict[str, list[str]]:
        lists = [field for field in msgspec.structs.fields(cls) if get_origin(field.type) is tuple]
        kinds = {field.name: get_args(field.type)[0] for field in lists}
        return {
            name: list(kind.__struct_fields__)
            for name, kind in kinds.items()
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        }


def _flat(part: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            texts = all(isinstance(item, str) for item in value)
            yield prefix + name, "; ".join(value) if texts else json_bytes(value).decode()
        else:
            yield prefix + name, value


class Page(Document, frozen=True, kw_only=True):
    """A document that is also a page."""

    @abstractmethod
    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""


#: What every engine that makes an instrumented copy calls the same things.
LOADED = "instrumented copy loaded"
COLD = "its first, cold run"
COUNTED = "its counted runs"

_WATCHER: ContextVar[Callable[[str], None] | None] = ContextVar("xpuruntime_moment", default=None)


def checkpoint(name: str) -> None:
    """Call the observer of this context with `name`, if there is one."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(name)


@contextlib.contextmanager
def observe_checkpoints(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call ``watcher(name)`` at every checkpoint inside of the block, in place of an outer observer."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


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
