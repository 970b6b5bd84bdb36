# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The kinds of field that hold several values: lists and mappings, shapes of inputs among them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from xpuruntime.policies.document import (
    MappingNode,
    Node,
    Refusals,
    Refused,
    ScalarNode,
    SequenceNode,
    describe,
    describe_value,
    from_python,
    quote,
)
from xpuruntime.policies.kinds import Kind, refuse_control_characters


class OneOrMore(Kind):
    """One item, or an ordered list of different items."""

    def __init__(
        self,
        item: Kind,
        doc: str = "",
        *,
        word: str | None = None,
        keep_single: bool = False,
        empty: bool = False,
        last: str | None = None,
        optional: bool = False,
    ) -> None:
        super().__init__(doc, optional=optional)
        self._item = item
        self._word = word
        self._keep_single = keep_single
        self._empty = empty
        self._last = last

    def expects(self) -> str:
        """Say what is accepted."""
        word = f"'{self._word}', " if self._word else ""
        return f"{word}{self._item.expects()}, or a list of them"

    def _check(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return self._list([(index, self._item.check, item) for index, item in enumerate(value)])
        return self._single(self._item.check, value, value)

    def _read(self, node: Node) -> Any:
        if isinstance(node, SequenceNode):
            return self._list([(index, self._item.read, item) for index, item in enumerate(node.items)])
        if not isinstance(node, ScalarNode):
            raise self.wrong_type(describe(node))
        return self._single(self._item.read, node, node.text)

    def _single(self, accept: Callable[[Any], Any], value: Any, text: Any) -> Any:
        if self._word is not None and isinstance(text, str) and text == self._word:
            return self._word
        if not isinstance(text, str):
            raise self.wrong_type(describe(value) if isinstance(value, Node) else describe_value(value))
        item = accept(value)
        return item if self._keep_single else (item,)

    def _list(self, entries: list[tuple[int, Callable[[Any], Any], Any]]) -> tuple[Any, ...]:
        if not entries and not self._empty:
            instead = f"write '{self._word}'" if self._word else "leave the key out"
            raise Refused(f"the list is empty. Fix: {instead} instead")
        items: dict[Any, None] = {}
        for index, accept, value in entries:
            text = value.text if isinstance(value, ScalarNode) else value
            try:
                if self._word is not None and text == self._word:
                    raise Refused(f"'{self._word}' stands alone. Fix: write '{self._word}' without a list")
                item = accept(value)
                if item in items:
                    raise Refused(f"{quote(str(item))} is listed twice. Fix: delete one")
                if self._last in items:
                    raise Refused(
                        f"nothing can come after '{self._last}', which accepts anything. Fix: write '{self._last}' last"
                    )
            except Refused as refused:
                raise (refused.at(value) if isinstance(value, Node) else refused).under(index) from None
            items[item] = None
        return tuple(items)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return list(value) if isinstance(value, tuple) else value

    def _schema(self) -> dict[str, Any]:
        item = self._item.schema()
        many: dict[str, Any] = {"type": "array", "items": item, "uniqueItems": True}
        if not self._empty:
            many["minItems"] = 1
        if self._word is None:
            return {"anyOf": [item, many]}
        return {"anyOf": [{"const": self._word}, item, many]}


class Nested(Kind):
    """Another policy value: an instance, or the mapping that describes one."""

    def __init__(
        self, cls: Any, doc: str = "", *, hidden: frozenset[str] = frozenset(), optional: bool = False
    ) -> None:
        super().__init__(doc, optional=optional)
        self.cls = cls
        self.hidden = hidden

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of the keys that the mapping may have."""
        return {name: kind for name, kind in self.cls.KINDS.items() if name not in self.hidden}

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping"

    def _check(self, value: Any) -> Any:
        if isinstance(value, self.cls):
            return value
        if not isinstance(value, dict):
            raise Refused(f"got {describe_value(value)}. Fix: state a {self.cls.__name__} or a mapping")
        return self._read(from_python(value))

    def _read(self, node: Node) -> Any:
        return self.cls.read(node, self.kinds)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else value.to_plain(self.hidden)

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:
        """Return the policy value whose paths are changed by `move`."""
        return None if value is None else value.relocated(move)

    def _schema(self) -> dict[str, Any]:
        return object_schema(self.kinds, self.cls.REQUIRED)


class ListOf(Kind):
    """A list of policy values."""

    def __init__(self, item: Nested, doc: str = "") -> None:
        super().__init__(doc)
        self.item = item

    def expects(self) -> str:
        """Say what is accepted."""
        return "a list of mappings"

    def _check(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise self.wrong_type(describe_value(value))
        return tuple(_each(self.item.check, value))

    def _read(self, node: Node) -> tuple[Any, ...]:
        if not isinstance(node, SequenceNode):
            raise self.wrong_type(describe(node))
        return tuple(_each(self.item.read, node.items))

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return [self.item.plain(item) for item in value]

    def _schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema()}


def _each(accept: Callable[[Any], Any], values: Any) -> list[Any]:
    accepted = []
    refusals = Refusals()
    for index, value in enumerate(values):
        try:
            accepted.append(accept(value))
        except Refused as refused:
            refusals.add((refused.at(value) if isinstance(value, Node) else refused).under(index))
    refusals.raise_any()
    return accepted


class MappingOf(Kind):
    """A mapping of free names to values, sorted by name."""

    def _check(self, value: Any) -> FrozenDict:
        if not isinstance(value, dict):
            raise self.wrong_type(describe_value(value))
        return self._read(from_python(value))

    def _read(self, node: Node) -> FrozenDict:
        if not isinstance(node, MappingNode):
            raise self.wrong_type(describe(node))
        return read_entries(node, self._check_name, self._read_value)

    def _check_name(self, name: str) -> None:
        raise NotImplementedError

    def _read_value(self, node: Node) -> Any:
        raise NotImplementedError


def read_entries(node: MappingNode, check_name: Callable[[str], object], read: Callable[[Node], Any]) -> FrozenDict:
    """Return the entries of a mapping, sorted by name. A refusal has the place of its name or value."""
    entries = {}
    refusals = Refusals()
    for name, (key_node, value) in sorted(node.entries.items()):
        try:
            check_name(name)
        except Refused as refused:
            refusals.add(refused.at(key_node))
            continue
        try:
            entries[name] = read(value)
        except Refused as refused:
            refusals.add(refused.at(value).under(name))
    refusals.raise_any()
    return FrozenDict(entries)


def object_schema(kinds: dict[str, Kind], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a mapping with these keys and no others."""
    properties = {name: kind.schema() for name, kind in kinds.items()}
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed and can be hashed. ``dict(x)`` is a copy that can be changed."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    #: What it is a part of, for the error.
    OWNER: ClassVar[str] = "a policy"
    #: What to do instead.
    FIX: ClassVar[str] = "make a copy with dict(...) and a new policy"

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(f"the mappings of {self.OWNER} are frozen; {self.FIX}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self


_MOST = 2**63 - 1
_RANGE = r"\s*([0-9]{1,19})\s*(?:\.\.\s*([0-9]{1,19})\s*)?\.\.\s*([0-9]{1,19})\s*"


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
        match = re.fullmatch(_RANGE, value)
        if match is None:
            raise Refused(f"{quote(value)} is not a size. Fix: state {self.expects()}")
        least, best, largest = (self._number(int(text)) for text in (match[1], match[2] or match[3], match[3]))
        if not least <= best <= largest:
            order = "..".join(str(size) for size in sorted({least, best, largest}))
            raise Refused(f"{quote(value)} is an empty range. Fix: write '{order}'")
        if least == largest:
            return least
        return f"{least}..{largest}" if best == largest else f"{least}..{best}..{largest}"

    def _number(self, value: int) -> int:
        if not 0 <= value <= _MOST:
            raise Refused(f"{describe_value(value)} is out of range. Fix: state {self.expects()}")
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
            raise Refused("an input needs a name. Fix: write a name of the model's inputs")
        refuse_control_characters(name)

    def _read_value(self, node: Node) -> tuple[int | str, ...]:
        if not isinstance(node, SequenceNode):
            raise Refused(f"got {describe(node)}. Fix: state a list of sizes such as [1, '1..512']")
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
