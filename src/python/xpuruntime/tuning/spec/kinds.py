# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Value kinds of tuning specifications: limits, words beside values, and values to search."""

from __future__ import annotations

from typing import Any

from xpuruntime.engines.control_builder import BOOL
from xpuruntime.policies.compound_kinds import FrozenDict, MappingOf, read_entries
from xpuruntime.policies.device_spec import check_engine
from xpuruntime.policies.document import (
    MappingNode,
    Node,
    Refused,
    ScalarNode,
    SequenceNode,
    describe,
    describe_value,
    did_you_mean,
    quote,
)
from xpuruntime.policies.kinds import Integer, Kind, Number, Text, refuse_control_characters

_MOST_ROUNDS = 10_000


class AtMost(Text):
    """An upper limit: ``<=`` and a value of another kind; stored as that value."""

    def __init__(self, item: Kind, doc: str = "") -> None:
        super().__init__(doc, what=f"'<=' and {item.expects()}", optional=True)
        self._item = item

    def _check(self, value: Any) -> Any:
        if not isinstance(value, str):
            return self._item.check(value)
        refuse_control_characters(value)
        text = value.strip()
        if not text.startswith("<="):
            raise Refused(f"{quote(value)} is not an upper limit. Fix: write '<={text.lstrip('<>= ')}'")
        return self._item.check(text[2:].strip())

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else f"<={self._item.plain(value)}"

    def _schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": "^\\s*<="}


class WordOr(Kind):
    """One of a few words that stand alone, or a value of another kind."""

    def __init__(self, words: tuple[str, ...], item: Kind, doc: str = "") -> None:
        super().__init__(doc)
        self._words, self._item = words, item

    def expects(self) -> str:
        """Say what is accepted."""
        return f"{', '.join(repr(word) for word in self._words)}, or {self._item.expects()}"

    def _check(self, value: Any) -> Any:
        return str(value) if isinstance(value, str) and value in self._words else self._inner(value, self._item.check)

    def _read(self, node: Node) -> Any:
        if isinstance(node, ScalarNode) and node.text in self._words:
            return node.text
        return self._inner(node, self._item.read)

    def _inner(self, value: Any, accept: Any) -> Any:
        text = value.text if isinstance(value, ScalarNode) else value
        if isinstance(text, str) and not isinstance(self._item, Text):
            raise Refused(f"{quote(text)} is not a valid value{did_you_mean(text, self._words, 'words')}")
        return accept(value)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return value if isinstance(value, str) and value in self._words else self._item.plain(value)

    def _schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self._words)}, self._item.schema()]}


class ThreadCount(Kind):
    """A number of threads, or ``physical``, ``logical`` or ``engine``: the cores, their hardware threads, unstated."""

    WORDS = ("engine", "physical", "logical")
    _COUNT = Integer(1, 4096)

    def expects(self) -> str:
        """Say what is accepted."""
        return f"{', '.join(self.WORDS)}, or {self._COUNT.expects()}"

    def _check(self, value: Any) -> Any:
        if isinstance(value, str):
            if value not in self.WORDS:
                raise Refused(f"{quote(value)} is not a valid value{did_you_mean(value, self.WORDS, 'words')}")
            return str(value)
        return self._COUNT.check(value)

    def _schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.WORDS)}, self._COUNT.schema()]}


class Rounds(Kind):
    """The fewest and the most rounds, as a list of two."""

    _ONE = Integer(3, _MOST_ROUNDS)

    def expects(self) -> str:
        """Say what is accepted."""
        return f"a list of two: the fewest and the most rounds, from 3 to {_MOST_ROUNDS}"

    def _check(self, value: Any) -> tuple[int, int]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise self.wrong_type(describe_value(value))
        return self._pair(*map(self._ONE.check, value))

    def _read(self, node: Node) -> tuple[int, int]:
        if not isinstance(node, SequenceNode) or len(node.items) != 2:
            raise self.wrong_type(describe(node))
        return self._pair(*map(self._ONE.read, node.items))

    def _pair(self, least: int, most: int) -> tuple[int, int]:
        if least > most:
            raise Refused(f"the fewest, {least}, are more than the most, {most}")
        return least, most

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return list(value)

    def _schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self._ONE.schema(), "minItems": 2, "maxItems": 2}


class OptionValues(MappingOf):
    """Engine to option to the values to try; an engine with no options has none of them searched."""

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of engine to a mapping of option to a list of values"

    def _check_name(self, name: str) -> None:
        check_engine(name)

    def _read_value(self, node: Node) -> FrozenDict:
        if not isinstance(node, MappingNode):
            raise Refused(f"got {describe(node)}. Fix: state a mapping of option to a list of values")
        return read_entries(node, refuse_control_characters, _values)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return {engine: {name: list(values) for name, values in options.items()} for engine, options in value.items()}

    def _schema(self) -> dict[str, Any]:
        scalar = {"type": ["string", "number", "boolean"]}
        values = {"type": "array", "items": scalar, "minItems": 1}
        return {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": values}}


class Resources(MappingOf):
    """What one trial needs of a Ray node: ``num_cpus``, ``num_gpus``, and custom resources by their names."""

    _WHOLE = Integer(1, 4096)
    _CUSTOM = Number(1e-4, 1e6)

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of num_cpus, num_gpus and custom resources to numbers"

    def _check_name(self, name: str) -> None:
        refuse_control_characters(name)
        if name in ("CPU", "GPU"):
            raise Refused(f"{quote(name)} is Ray's own. Fix: write num_{name.lower()}s")
        if name in ("", "memory", "object_store_memory"):
            raise Refused(f"{quote(name)} cannot be a custom resource. Fix: leave it out, or use another name")

    def _read_value(self, node: Node) -> Any:
        return self._CUSTOM.read(node)

    def _read(self, node: Node) -> FrozenDict:
        limits = super()._read(node)
        for name in ("num_cpus", "num_gpus"):
            if name in limits and limits[name] != int(limits[name]):
                raise Refused("a trial has whole ones, which it shares with no other").under(name)
        return FrozenDict({name: int(limit) if name.startswith("num_") else limit for name, limit in limits.items()})

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return dict(value)

    def _schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"num_cpus": self._WHOLE.schema(), "num_gpus": self._WHOLE.schema()},
            "additionalProperties": self._CUSTOM.schema(),
        }


def _values(node: Node) -> tuple[str, ...]:
    if not isinstance(node, SequenceNode) or not node.items:
        raise Refused(f"got {describe(node)}. Fix: state a list of values to try")
    texts = []
    for index, item in enumerate(node.items):
        if not isinstance(item, ScalarNode) or item.value is None:
            raise Refused(f"expected text, a number, true or false, got {describe(item)}", index).at(item)
        text = BOOL[item.value] if isinstance(item.value, bool) else str(item.value)
        refuse_control_characters(text)
        if text in texts:
            raise Refused(f"{quote(text)} is listed twice", index).at(item)
        texts.append(text)
    return tuple(texts)
