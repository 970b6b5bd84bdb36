# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Input shapes: the sizes that a model is made ready for, as a frozen mapping of input to dimensions."""

from __future__ import annotations

import re
from typing import Any

from xpuruntime.policies.compound_kinds import MappingOf
from xpuruntime.policies.document import Node, ScalarNode, SequenceNode, describe, describe_value
from xpuruntime.policies.kinds import Kind, refuse_control_characters
from xpuruntime.policies.refusal import Refused, quote

__all__ = ["InputShapes", "Size", "split_size"]

_MOST = 2**63 - 1
_RANGE = re.compile(r"\s*([0-9]{1,19})\s*(?:\.\.\s*([0-9]{1,19})\s*)?\.\.\s*([0-9]{1,19})\s*")


def split_size(size: int | str) -> tuple[int, int, int]:
    """Return least, best and largest size of a dimension in the canonical form of `Size`."""
    if isinstance(size, int):
        return size, size, size
    numbers = [int(number) for number in size.split("..")]
    return numbers[0], numbers[-2] if len(numbers) == 3 else numbers[-1], numbers[-1]


class Size(Kind):
    """One dimension: a size, or ``"1..512"`` from least to largest, or ``"1..128..512"`` with the best in the middle.

    Where the middle is left out, the largest counts as the best; ``"4..4"`` is the size 4.
    """

    def expects(self) -> str:
        """Say what is accepted."""
        return "a size such as 8, or a range such as '1..512' (min..max) or '1..128..512' (min..opt..max)"

    def _check(self, value: Any) -> int | str:
        if isinstance(value, int) and not isinstance(value, bool):
            return self._number(value)
        if not isinstance(value, str):
            raise self.wrong_type(describe_value(value))
        refuse_control_characters(value)
        if re.fullmatch(r"\s*[0-9]{1,19}\s*", value):
            return self._number(int(value))
        match = _RANGE.fullmatch(value)
        if match is None:
            raise Refused(f"{quote(value)} is not a size; expected {self.expects()}")
        least, best, largest = (self._number(int(text)) for text in (match[1], match[2] or match[3], match[3]))
        if not least <= best <= largest:
            order = "..".join(str(size) for size in sorted({least, best, largest}))
            raise Refused(f"{quote(value)} is an empty range; write '{order}'")
        if least == largest:
            return least
        return f"{least}..{largest}" if best == largest else f"{least}..{best}..{largest}"

    def _number(self, value: int) -> int:
        if not 0 <= value <= _MOST:
            raise Refused(f"{describe_value(value)} is out of range; expected {self.expects()}")
        return int(value)

    def _read(self, node: Node) -> int | str:
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        return self._check(node.value if isinstance(node.value, (int, float)) else node.text)

    def _schema(self) -> dict[str, Any]:
        number, gap = "[0-9]{1,19}", r"\s*"
        pattern = f"^{gap}{number}{gap}(\\.\\.{gap}{number}{gap}){{0,2}}$"
        return {"anyOf": [{"type": "integer", "minimum": 0, "maximum": _MOST}, {"type": "string", "pattern": pattern}]}


class InputShapes(MappingOf):
    """Input name to the sizes of its dimensions. Sorted by name; an empty list is the shape of a single number."""

    _SIZE = Size()

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of input to its dimensions, such as {image: [1, 3, 224, 224], ids: [1, '1..512']}"

    def _check_name(self, name: str) -> None:
        if not name.strip():
            raise Refused("an input needs a name")
        refuse_control_characters(name)

    def _read_value(self, node: Node) -> tuple[int | str, ...]:
        if not isinstance(node, SequenceNode):
            raise Refused(f"expected a list of sizes such as [1, '1..512'], got {describe(node)}")
        sizes = []
        for axis, item in enumerate(node.items):
            try:
                sizes.append(self._SIZE.read(item))
            except Refused as refused:
                raise refused.at(item).under(axis) from None
        return tuple(sizes)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return {name: list(shape) for name, shape in value.items()}

    def _schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": r"\S"},
            "additionalProperties": {"type": "array", "items": self._SIZE.schema()},
        }
