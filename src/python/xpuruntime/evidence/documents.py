# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Document`: a record that is printed, shown in a notebook, and written as JSON; `Page`: also as a page."""

from __future__ import annotations

import csv
import io
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, json_text, reason_of, user_path
from xpuruntime.files.writing import replace_file
from xpuruntime.notebook import Shown
from xpuruntime.printable import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Document", "Page", "write_whole"]


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> Path:
    """Write `text` to `path`. A crash or a full disk leaves the old file, or none."""
    target = user_path(path, what)
    try:
        replace_file(target, text.encode("utf-8", "backslashreplace"), private=False)
    except OSError as error:
        raise InputError(
            f"cannot write {what} to '{target}': {reason_of(error)}. Give a path in a folder that "
            "exists, is writable and has free space."
        ) from error
    return target


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
        """Return a table of the record, as `records` does, as a ``pandas.DataFrame``. Needs pandas."""
        import pandas as pd

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
        """Return the fields with a row for each part, and the fields of a part."""
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

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of `to_html`. A crash or a full disk leaves the old file, or none.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        return write_whole(path, self.to_html(), f"the page of {self.NOUN}")
