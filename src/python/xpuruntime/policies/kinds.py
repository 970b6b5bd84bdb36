# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The kinds of value a policy field can hold.

One kind does all the work for its field: it checks what a constructor is given, reads what a file says, writes it back,
and describes itself for the JSON Schema. Each field of a policy class is stated with its kind.
"""

from __future__ import annotations

import math
import os
import re
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.policies.document import Node, Refused, ScalarNode, describe, describe_value, did_you_mean, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Choice",
    "FilePath",
    "Flag",
    "Integer",
    "Kind",
    "Number",
    "Text",
    "in_folder",
    "refuse_control_characters",
    "seen_from",
]

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def refuse_control_characters(text: str) -> None:
    """Raise `Refused` for text that could not be written to a file, or shown, as it is."""
    if (match := _CONTROL.search(text)) is not None:
        raise Refused(f"{quote(text)} holds the character U+{ord(match[0]):04X}, which a policy cannot hold")


class Kind:
    """What a field accepts."""

    def __init__(self, doc: str = "", *, optional: bool = False) -> None:
        self.doc = doc
        self.optional = optional

    def check(self, value: Any) -> Any:
        """Return the canonical form of a Python value. Raises `Refused`."""
        if value is None and self.optional:
            return None
        return self._check(value)

    def read(self, node: Node) -> Any:
        """Return the canonical form of a node of a document. Raises `Refused`."""
        if isinstance(node, ScalarNode) and node.value is None:
            if self.optional:
                return None
            raise Refused(f"has no value; expected {self.expects()}")
        return self._read(node)

    def plain(self, value: Any) -> Any:
        """Return a canonical value as plain lists, dicts and scalars, to be written."""
        return value

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:  # noqa: ARG002 - for kinds that hold paths
        """Return a canonical value whose paths are changed by `move`."""
        return value

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the field."""
        schema = self._schema()
        if self.optional:
            schema = {"anyOf": [schema, {"type": "null"}]}
        return {"description": self.doc, **schema} if self.doc else schema

    def expects(self) -> str:
        """Say what is accepted, as in "expected ..."."""
        raise NotImplementedError

    def _check(self, value: Any) -> Any:
        raise NotImplementedError

    def _read(self, node: Node) -> Any:
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        return self._check(node.value)

    def _schema(self) -> dict[str, Any]:
        raise NotImplementedError

    def wrong_type(self, got: str) -> Refused:
        """Return the refusal of a value of another type."""
        return Refused(f"expected {self.expects()}, got {got}")


class _TextKind(Kind):
    """Reads the text of a scalar, whatever a YAML reader would make of it."""

    def _read(self, node: Node) -> Any:
        if isinstance(node, ScalarNode) and node.text is not None:
            return self._check(node.text)
        raise self.wrong_type(describe(node))


class Text(_TextKind):
    """Text that `parse` accepts and returns in canonical form; `parse` raises `Refused`."""

    def __init__(
        self,
        doc: str = "",
        *,
        what: str = "text",
        parse: Callable[[str], str] = lambda text: text,
        pattern: str | None = None,
        optional: bool = False,
    ) -> None:
        super().__init__(doc, optional=optional)
        self._what = what
        self._parse = parse
        self._pattern = pattern

    def expects(self) -> str:
        """Say what is accepted."""
        return self._what

    def _check(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise self.wrong_type(describe_value(value))
        if not value.strip():
            raise Refused(f"is empty; expected {self._what}")
        refuse_control_characters(value)
        return self._parse(str(value))

    def _schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self._pattern or r"\S"}


class Choice(_TextKind):
    """One of a few words."""

    def __init__(self, words: Sequence[str], doc: str = "", *, what: str = "values", optional: bool = False) -> None:
        super().__init__(doc, optional=optional)
        self.words = tuple(words)
        self._what = what

    def expects(self) -> str:
        """Say what is accepted."""
        return f"one of {', '.join(self.words)}"

    def _check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong_type(describe_value(value))
        if value not in self.words:
            raise Refused(f"{quote(value)} is not a valid value{did_you_mean(value, self.words, self._what)}")
        return str(value)

    def _schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


class Flag(Kind):
    """True or false. Unquoted YAML may also say on, off, yes or no."""

    _YAML_WORDS: ClassVar[dict[str, bool]] = {"on": True, "yes": True, "off": False, "no": False}

    def expects(self) -> str:
        """Say what is accepted."""
        return "true or false"

    def _check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.wrong_type(describe_value(value))
        return value

    def _read(self, node: Node) -> bool:
        if isinstance(node, ScalarNode) and node.plain and node.text is not None:
            word = self._YAML_WORDS.get(node.text.casefold())
            if word is not None:
                return word
        flag: bool = super()._read(node)
        return flag

    def _schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Integer(Kind):
    """A whole number from `least` to `most`."""

    def __init__(self, least: int, most: int, doc: str = "", *, optional: bool = False) -> None:
        super().__init__(doc, optional=optional)
        self._least, self._most = least, most

    def expects(self) -> str:
        """Say what is accepted."""
        return f"a whole number from {self._least} to {self._most}"

    def _check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_type(describe_value(value))
        if not self._least <= value <= self._most:
            raise Refused(f"{describe_value(value)} is out of range; expected {self.expects()}")
        return int(value)

    def _schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self._least, "maximum": self._most}


class Number(Kind):
    """A finite number from `least` to `most`; stored as a float."""

    def __init__(self, least: float, most: float, doc: str = "", *, optional: bool = False) -> None:
        super().__init__(doc, optional=optional)
        self._least, self._most = least, most

    def expects(self) -> str:
        """Say what is accepted."""
        if math.isinf(self._most):
            return f"a finite number, {self._least:g} or more"
        return f"a number from {self._least:g} to {self._most:g}"

    def _check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong_type(describe_value(value))
        # Compared before the conversion, which overflows for huge whole numbers; false for NaN and infinity too.
        if not self._least <= value <= min(self._most, sys.float_info.max):
            raise Refused(f"{describe_value(value)} is out of range; expected {self.expects()}")
        return float(value) + 0.0  # no negative zero

    def _schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number", "minimum": self._least}
        return schema if math.isinf(self._most) else {**schema, "maximum": self._most}


class FilePath(Text):
    """The path of a file or folder; `words` are values that are no path."""

    def __init__(self, doc: str = "", *, words: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(doc, **options)
        self._words = words

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:
        """Return the path as `move` changes it."""
        return value if value is None or value in self._words else move(value)


def in_folder(folder: str) -> Callable[[str], str]:
    """Return a function from a path, where that is relative, to the absolute path below a folder."""
    base = os.path.abspath(folder or os.curdir)  # noqa: PTH100 - keeps links

    def move(path: str) -> str:
        return path if _is_fixed(path) else os.path.normpath(os.path.join(base, path))  # noqa: PTH118

    return move


def seen_from(folder: str) -> Callable[[str], str]:
    """Return a function from a path to the same as a file in a folder states it: relative where it is below that."""
    base = os.path.abspath(folder or os.curdir)  # noqa: PTH100 - keeps links

    def move(path: str) -> str:
        if path.startswith("~"):
            return path
        absolute = os.path.abspath(path)  # noqa: PTH100 - keeps links
        if not absolute.startswith(os.path.join(base, "")):  # noqa: PTH118
            return absolute
        return os.path.relpath(absolute, base).replace(os.sep, "/")

    return move


def _is_fixed(path: str) -> bool:
    return os.path.isabs(path) or path.startswith("~")  # noqa: PTH117 - text, which may be of another system
