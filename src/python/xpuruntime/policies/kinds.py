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
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, ClassVar

from xpuruntime.errors import InputError
from xpuruntime.policies.document import (
    Node,
    Refused,
    ScalarNode,
    describe,
    describe_value,
    did_you_mean,
    nearest,
    quote,
)

_CONTROL = "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]"


def refuse_control_characters(text: str) -> None:
    """Raise `Refused` for text that could not be written to a file, or shown, as it is."""
    if not text.isprintable() and (match := re.search(_CONTROL, text)) is not None:
        raise Refused(
            f"{quote(text)} holds the character U+{ord(match[0]):04X}, which a policy cannot hold. Fix: delete it"
        )


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
            raise Refused(f"has no value. Fix: state {self.expects()}")
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
        """Say what is accepted, as in "Fix: state ..."."""
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
        return Refused(f"got {got}. Fix: state {self.expects()}")


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
            raise Refused(f"is empty. Fix: state {self._what}")
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
            raise Refused(f"{describe_value(value)} is out of range. Fix: state {self.expects()}")
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
            raise Refused(f"{describe_value(value)} is out of range. Fix: state {self.expects()}")
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


_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,30})?)"
_PERCENT = rf"\s*{_NUMBER}\s*%\s*"
_DURATION = rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*"
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_LONGEST = 168 * 3600


class Percentage(Kind):
    """A share of something: text in percent such as ``"5%"``, or a number below 1; stored as a float."""

    def __init__(self, doc: str = "", *, most: float = 10.0, optional: bool = False) -> None:
        super().__init__(doc, optional=optional)
        self._most = most

    def expects(self) -> str:
        """Say what is accepted."""
        return f"a share from 0% to {self._most:.0%}, such as '5%' or 0.05"

    def _check(self, value: Any) -> float:
        if isinstance(value, str):
            refuse_control_characters(value)
            match = re.fullmatch(_PERCENT, value)
            if match is None:
                raise Refused(f"{quote(value)} is not a share. Fix: state {self.expects()}")
            share = float(Decimal(match[1]) / 100)
            if share > self._most:
                raise Refused(f"{quote(value)} is out of range. Fix: state {self.expects()}")
            return share
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong_type(describe_value(value))
        if isinstance(value, float) and 1 <= value <= self._most:
            return value  # the canonical form of more than 100%
        if not 0 <= value < 1:
            fix = f"write '{value:g}%'" if 1 <= value <= 100 else f"state {self.expects()}"
            raise Refused(f"{describe_value(value)} is out of range. Fix: {fix}")
        return float(value) + 0.0

    def _read(self, node: Node) -> float:
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        value = node.value
        if isinstance(value, float) and value >= 1:
            value = int(value) if value.is_integer() else value
            raise Refused(f"{describe_value(value)} is out of range. Fix: state {self.expects()}")
        return self._check(value)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else _percent(value)

    def _schema(self) -> dict[str, Any]:
        number = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [number, {"type": "string", "pattern": f"^{_PERCENT}$"}]}


class Duration(Kind):
    """A time: text with a unit, ``ms``, ``s``, ``m`` or ``h``; stored as seconds."""

    UNITS: ClassVar[dict[str, Decimal]] = _SECONDS
    SHORTEST: ClassVar[tuple[float, str]] = (0.001, "1ms")

    def expects(self) -> str:
        """Say what is accepted."""
        return "a duration such as '120s', '500ms' or '10m'"

    def _check(self, value: Any) -> float:
        if isinstance(value, float):
            seconds = value  # the canonical form
        elif isinstance(value, str):
            refuse_control_characters(value)
            seconds = self._parse(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            raise Refused(f"{describe_value(value)} has no unit. Fix: write '{str(value)[:9]}s' for seconds")
        else:
            raise self.wrong_type(describe_value(value))
        if not self.SHORTEST[0] <= seconds <= _LONGEST:
            raise Refused(f"{quote(str(value))} is out of range. Fix: state a duration from {self.SHORTEST[1]} to 168h")
        return seconds

    def _parse(self, text: str) -> float:
        match = re.fullmatch(_DURATION, text)
        if match is None:
            raise Refused(f"{quote(text)} is not a duration. Fix: state {self.expects()}")
        unit = match[2]
        if unit not in self.UNITS:
            near = nearest(unit, self.UNITS)
            meant = f"{match[1]}{near if near and unit else 's'}"
            what = f"unit {unit!r} is not known" if unit else "no unit is given"
            hint = did_you_mean(text, self.UNITS, "units", near=meant)
            raise Refused(f"{quote(text)} is not a duration: {what}{hint}")
        return float(Decimal(match[1]) * self.UNITS[unit])

    def _read(self, node: Node) -> float:
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        if isinstance(node.value, float):
            if not math.isfinite(node.value):
                raise Refused(f"{describe_value(node.value)} is not a duration. Fix: state {self.expects()}")
            raise Refused(f"{describe_value(node.value)} has no unit. Fix: write '{node.value:g}s' for seconds")
        return self._check(node.value)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else f"{_digits(Decimal(repr(value)))}s"

    def _schema(self) -> dict[str, Any]:
        number = _NUMBER.replace("(?:", "(")
        return {"type": "string", "pattern": rf"^\s*{number}\s*({'|'.join(self.UNITS)})\s*$"}


class ShortDuration(Duration):
    """A time that may be as short as a microsecond: text with a unit, also ``us``."""

    UNITS: ClassVar[dict[str, Decimal]] = {"us": Decimal("0.000001"), **_SECONDS}
    SHORTEST: ClassVar[tuple[float, str]] = (1e-6, "1us")


def read_duration(text: str, what: str) -> float:
    """Return the seconds of a duration such as ``"120s"``. Raises InputError, in which `what` names the argument."""
    try:
        seconds: float = Duration().check(text)
    except Refused as refused:
        raise InputError(f"{what}: {refused.message()}") from None
    return seconds


def share_text(share: float) -> str:
    """Return a share in percent, with at most three digits: ``"5%"``, ``"4.27%"``."""
    return f"{share * 100:.3g}%"


def duration_text(seconds: float) -> str:
    """Return a duration as text: ``"120s"``, ``"0.5s"``."""
    return f"{seconds:.6g}s"


def _percent(share: float) -> Any:
    """Return a share as `Percentage` reads it back exactly: in percent where that is short, else as the number."""
    text = _digits(Decimal(repr(share)) * 100)
    return f"{text}%" if len(text) <= 24 or share >= 1 else share


def _digits(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
