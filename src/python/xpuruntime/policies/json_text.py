# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""JSON text to and from a document tree, with the line and column of every value."""

from __future__ import annotations

import bisect
import json
import re
from typing import Any

from xpuruntime.policies.document import MAX_DEPTH, MappingNode, Node, ScalarNode, SequenceNode, too_deep
from xpuruntime.policies.refusal import Refused

__all__ = ["read_json", "write_json"]

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_LONGEST_NUMBER = 100
_DECODER = json.JSONDecoder()


def read_json(text: str) -> Node:
    """Read JSON text into a tree. Raises `Refused`; deep nesting is refused as soon as it is met."""
    reader = _Reader(text)
    start = reader.skip(0)
    if start == len(text):
        raise Refused('the file is empty. Fix: state a key, such as {"mode": "strict"} in a policy').at(Node(1, 1))
    node, end = reader.value(start, 0)
    end = reader.skip(end)
    if end != len(text):
        raise reader.refused("more text after the end of the policy", end)
    return node


def write_json(value: dict[str, Any]) -> str:
    """Write plain dicts, lists and scalars as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


class _Reader:
    """A recursive reader; its depth is bounded by `MAX_DEPTH`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(self, at: int) -> tuple[int, int]:
        line = bisect.bisect_right(self.line_starts, at)
        return line, at - self.line_starts[line - 1] + 1

    def refused(self, reason: str, at: int) -> Refused:
        return Refused(f"not valid JSON: {reason}").at(Node(*self.place(at)))

    def skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def value(self, at: int, depth: int) -> tuple[Node, int]:
        first = self.text[at : at + 1]
        if first in ("{", "[") and depth >= MAX_DEPTH:
            raise too_deep(Node(*self.place(at)))
        if first == '"':
            text, end = self.string(at)
            return ScalarNode(*self.place(at), text, text), end
        if first == "{":
            return self.mapping(at, depth)
        if first == "[":
            return self.items(at, depth)
        if (number := _NUMBER.match(self.text, at)) is not None:
            return ScalarNode(*self.place(at), self.number(number, at), None), number.end()
        word = _WORD.match(self.text, at)
        if word is not None and word[0] in _WORDS:
            return ScalarNode(*self.place(at), _WORDS[word[0]], None), word.end()
        if word is not None:
            raise self.refused(f"expected a value, found {word[0][:60]}; text needs double quotes", at)
        raise self.refused("expected a value" + (f", found {first!r}" if first else ", found the end"), at)

    def number(self, match: re.Match[str], at: int) -> int | float:
        if len(match[0]) > _LONGEST_NUMBER:
            raise self.refused("a number with too many digits", at)
        return float(match[0]) if match[1] or match[2] else int(match[0])

    def string(self, at: int) -> tuple[str, int]:
        try:
            text, end = _DECODER.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            raise self.refused(error.msg.lower().removesuffix(" at"), error.pos) from None
        return text, end

    def items(self, at: int, depth: int) -> tuple[Node, int]:
        node = SequenceNode(*self.place(at), [])
        end = self.skip(at + 1)
        if self.text[end : end + 1] == "]":
            return node, end + 1
        while True:
            item, end = self.value(end, depth + 1)
            node.items.append(item)
            end, done = self.separator(end, "]")
            if done:
                return node, end

    def mapping(self, at: int, depth: int) -> tuple[Node, int]:
        node = MappingNode(*self.place(at), {})
        end = self.skip(at + 1)
        if self.text[end : end + 1] == "}":
            return node, end + 1
        while True:
            if self.text[end : end + 1] != '"':
                raise self.refused("expected a key in double quotes", end)
            key_node = Node(*self.place(end))
            key, end = self.string(end)
            end = self.skip(end)
            if self.text[end : end + 1] != ":":
                raise self.refused("expected ':' after a key", end)
            value, end = self.value(self.skip(end + 1), depth + 1)
            node.add(key_node, key, value)
            end, done = self.separator(end, "}")
            if done:
                return node, end

    def separator(self, at: int, closing: str) -> tuple[int, bool]:
        at = self.skip(at)
        mark = self.text[at : at + 1]
        if mark == closing:
            return at + 1, True
        if mark != ",":
            raise self.refused(f"expected ',' or '{closing}'", at)
        return self.skip(at + 1), False
