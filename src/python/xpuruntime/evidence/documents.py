# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Document`: a record that is printed, shown in a notebook, and written as JSON; `Page`: also as a page."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, json_text, reason_of, user_path
from xpuruntime.files.writing import replace_file
from xpuruntime.notebook import Shown

if TYPE_CHECKING:
    import os
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

    `NOUN` names it in messages; `STATED` are the properties that its JSON has beside its fields.
    """

    NOUN: ClassVar[str] = "the result"
    STATED: ClassVar[tuple[str, ...]] = ()

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
