# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The kinds of field that hold several values: lists and mappings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.policies.document import (
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    describe,
    describe_value,
    from_python,
)
from xpuruntime.policies.frozen_dict import FrozenDict
from xpuruntime.policies.kinds import Kind
from xpuruntime.policies.refusal import Refused, quote

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ListOf", "MappingOf", "Nested", "OneOrMore", "object_schema", "read_entries"]


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
            raise Refused(f"the list is empty; {instead} instead")
        items: list[Any] = []
        for index, accept, value in entries:
            text = value.text if isinstance(value, ScalarNode) else value
            try:
                if self._word is not None and text == self._word:
                    raise Refused(f"'{self._word}' stands alone, not in a list")
                item = accept(value)
                if item in items:
                    raise Refused(f"{quote(str(item))} is listed twice")
                if self._last in items:
                    raise Refused(f"nothing can come after '{self._last}', which accepts anything")
            except Refused as refused:
                raise (refused.at(value) if isinstance(value, Node) else refused).under(index) from None
            items.append(item)
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
            raise Refused(f"expected a {self.cls.__name__} or a mapping, got {describe_value(value)}")
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
    for index, value in enumerate(values):
        try:
            accepted.append(accept(value))
        except Refused as refused:
            raise (refused.at(value) if isinstance(value, Node) else refused).under(index) from None
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
        """Raise `Refused` for text that cannot be a name."""
        raise NotImplementedError

    def _read_value(self, node: Node) -> Any:
        raise NotImplementedError


def read_entries(node: MappingNode, check_name: Callable[[str], object], read: Callable[[Node], Any]) -> FrozenDict:
    """Return the entries of a mapping, sorted by name. A refusal has the place of its name or value."""
    found = {}
    for name, (key_node, value) in sorted(node.entries.items()):
        try:
            check_name(name)
        except Refused as refused:
            raise refused.at(key_node) from None
        try:
            found[name] = read(value)
        except Refused as refused:
            raise refused.at(value).under(name) from None
    return FrozenDict(found)


def object_schema(kinds: dict[str, Kind], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a mapping with these keys and no others."""
    properties = {name: kind.schema() for name, kind in kinds.items()}
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema
