# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`IntRange`: conditions on a whole number, such as ``"<=16"``, and the bounds that they set."""

from __future__ import annotations

import re
from typing import Any

from xpuruntime.policies.document import describe_value
from xpuruntime.policies.kinds import Text
from xpuruntime.policies.refusal import Refused, quote

__all__ = ["IntRange", "bounds_of"]

_MOST = 2**63 - 1
_BOUND = re.compile(r"(<=|>=|<|>)\s*([0-9]{1,19})")
_SPAN = re.compile(r"([0-9]{1,19})\s*\.\.\s*([0-9]{1,19})")


class IntRange(Text):
    """A whole number, or a condition: ``"<=16"``, ``"<16"``, ``">=128"``, ``">128"``, ``"1..64"`` (both ends in)."""

    def __init__(self, doc: str) -> None:
        super().__init__(doc, what="a whole number such as 16, or a condition such as '<=16', '>=128' or '1..64'")
        self.optional = True

    def _check(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value <= _MOST:
                raise Refused(f"{describe_value(value)} is out of range; expected {self.expects()}")
            return int(value)
        text = super()._check(value).strip()
        if re.fullmatch("[0-9]{1,19}", text):
            return self._check(int(text))
        if (bound := _BOUND.fullmatch(text)) is not None:
            return f"{bound[1]}{self._check(int(bound[2]))}"
        if (span := _SPAN.fullmatch(text)) is not None:
            first, last = self._check(int(span[1])), self._check(int(span[2]))
            if first > last:
                raise Refused(f"{quote(text)} is an empty range; write '{last}..{first}'")
            return f"{first}..{last}"
        raise Refused(f"{quote(text)} is not a condition; expected {self.expects()}")

    def _read(self, node: Any) -> Any:
        if isinstance(getattr(node, "value", None), int):
            return self._check(node.value)
        return super()._read(node)

    def _schema(self) -> dict[str, Any]:
        number, gap = "[0-9]{1,19}", r"\s*"
        pattern = f"^{gap}(((<=|>=|<|>){gap})?{number}|{number}{gap}\\.\\.{gap}{number}){gap}$"
        return {"anyOf": [{"type": "integer", "minimum": 0, "maximum": _MOST}, {"type": "string", "pattern": pattern}]}


def bounds_of(condition: int | str) -> tuple[int, int]:
    """Return the first and the last number that meet a condition in the canonical form of `IntRange`.

    The last is less than the first where none does.
    """
    if isinstance(condition, int):
        return condition, condition
    if (span := _SPAN.fullmatch(condition)) is not None:
        return int(span[1]), int(span[2])
    bound = _BOUND.fullmatch(condition)
    assert bound is not None
    number = int(bound[2])
    if bound[1] == "<=":
        return 0, number
    if bound[1] == "<":
        return 0, number - 1
    if bound[1] == ">=":
        return number, _MOST
    return (number + 1, _MOST) if number < _MOST else (1, 0)
