# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kinds of field with a unit: shares such as ``5%`` and durations such as ``120s``."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, ClassVar

from xpuruntime.errors import InputError
from xpuruntime.policies.document import Node, Refused, ScalarNode, describe, describe_value, nearest, quote
from xpuruntime.policies.kinds import Kind, refuse_control_characters

__all__ = ["Duration", "Percentage", "ShortDuration", "duration_text", "read_duration", "share_text"]

_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,30})?)"
_PERCENT = re.compile(rf"\s*{_NUMBER}\s*%\s*")
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
            match = _PERCENT.fullmatch(value)
            if match is None:
                raise Refused(f"{quote(value)} is not a share; expected {self.expects()}")
            share = float(Decimal(match[1]) / 100)
            if share > self._most:
                raise Refused(f"{quote(value)} is out of range; expected {self.expects()}")
            return share
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong_type(describe_value(value))
        if isinstance(value, float) and 1 <= value <= self._most:
            return value  # the canonical form of more than 100%
        if not 0 <= value < 1:
            fix = f"write '{value:g}%'" if 1 <= value <= 100 else f"expected {self.expects()}"
            raise Refused(f"{describe_value(value)} is out of range; {fix}")
        return float(value) + 0.0

    def _read(self, node: Node) -> float:
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        value = node.value
        if isinstance(value, float) and value >= 1:
            value = int(value) if value.is_integer() else value
            raise Refused(f"{describe_value(value)} is out of range; expected {self.expects()}")
        return self._check(value)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else _percent(value)

    def _schema(self) -> dict[str, Any]:
        number = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
        return {"anyOf": [number, {"type": "string", "pattern": f"^{_PERCENT.pattern}$"}]}


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
            raise Refused(f"{describe_value(value)} has no unit; write '{str(value)[:9]}s' for seconds")
        else:
            raise self.wrong_type(describe_value(value))
        if not self.SHORTEST[0] <= seconds <= _LONGEST:
            raise Refused(f"{quote(str(value))} is out of range; a duration is from {self.SHORTEST[1]} to 168h")
        return seconds

    def _parse(self, text: str) -> float:
        match = re.fullmatch(_DURATION, text)
        if match is None:
            raise Refused(f"{quote(text)} is not a duration; expected {self.expects()}")
        unit = match[2]
        if unit not in self.UNITS:
            near = nearest(unit, self.UNITS)
            question = f"; did you mean '{match[1]}{near}'?" if near and unit else "."
            what = f"unit {unit!r} is not known" if unit else "no unit is given"
            raise Refused(f"{quote(text)} is not a duration: {what}{question} Valid units: {', '.join(self.UNITS)}.")
        return float(Decimal(match[1]) * self.UNITS[unit])

    def _read(self, node: Node) -> float:
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        if isinstance(node.value, float):
            if not math.isfinite(node.value):
                raise Refused(f"{describe_value(node.value)} is not a duration; expected {self.expects()}")
            raise Refused(f"{describe_value(node.value)} has no unit; write '{node.value:g}s' for seconds")
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
