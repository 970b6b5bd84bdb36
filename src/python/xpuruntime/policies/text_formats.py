# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""JSON and YAML text to and from a document tree, with the line and column of every value."""

from __future__ import annotations

import bisect
import json
import re
from typing import Any

from xpuruntime.policies.document import (
    MAX_DEPTH,
    MappingNode,
    Node,
    Refused,
    ScalarNode,
    SequenceNode,
    quote,
    too_deep,
)

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_LONGEST_NUMBER = 100
_DECODER = json.JSONDecoder()
#: By the first word of what the decoder says.
_JSON_FIX = {"Unterminated": "close the text with a double quote", "Invalid": "escape it, such as \\\\ or \\n"}


def read_json(text: str) -> Node:
    """Read JSON text into a tree. Raises `Refused`; deep nesting is refused as soon as it is met."""
    reader = _Reader(text)
    start = reader.skip(0)
    if start == len(text):
        raise Refused('the file is empty. Fix: state a key, such as {"mode": "strict"} in a policy').at(Node(1, 1))
    node, end = reader.value(start, 0)
    end = reader.skip(end)
    if end != len(text):
        raise reader.refused("more text after the end of the policy", end, "delete it")
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

    def refused(self, reason: str, at: int, fix: str) -> Refused:
        return Refused(f"not valid JSON: {reason}. Fix: {fix}").at(Node(*self.place(at)))

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
            raise self.refused(f"expected a value, found {word[0][:60]}", at, f'write "{word[0][:60]}"')
        found = repr(first) if first else "the end"
        raise self.refused(f"expected a value, found {found}", at, 'write a value, such as "strict" or {}')

    def number(self, match: re.Match[str], at: int) -> int | float:
        if len(match[0]) > _LONGEST_NUMBER:
            raise self.refused("a number with too many digits", at, "shorten it")
        return float(match[0]) if match[1] or match[2] else int(match[0])

    def string(self, at: int) -> tuple[str, int]:
        try:
            text, end = _DECODER.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            raise self.refused(
                error.msg.lower().removesuffix(" at"), error.pos, _JSON_FIX[error.msg.split()[0]]
            ) from None
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
                raise self.refused(
                    "expected a key in double quotes", end, 'write a key, such as "mode", or delete the comma'
                )
            key_node = Node(*self.place(end))
            key, end = self.string(end)
            end = self.skip(end)
            if self.text[end : end + 1] != ":":
                raise self.refused("expected ':' after a key", end, f'write "{key[:60]}": and a value')
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
            raise self.refused(
                f"expected ',' or '{closing}'", at, f"write '{closing}' after the last value, or ',' before another"
            )
        return self.skip(at + 1), False


_CORE_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_INT = re.compile(r"[-+]?[0-9]{1,64}|0o[0-7]{1,64}|0x[0-9a-fA-F]{1,64}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,64}|[0-9]{1,64}(\.[0-9]{0,64})?)([eE][-+]?[0-9]{1,8})?")
# What may go without quotes, unless PyYAML finds that its YAML 1.1 would read it as a truth value or nothing.
_SAFE_PLAIN = re.compile(r"[0-9]+[KMGT]iB|[A-Za-z][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*")


def core_value(text: str) -> Any:
    """Return the value of a plain scalar under the YAML 1.2 core schema."""
    if text in _CORE_WORDS:
        return _CORE_WORDS[text]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def read_yaml(text: str) -> Node:
    """Read YAML text into a tree. Raises `Refused`; deep nesting is refused as soon as it is met."""
    import yaml

    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, text) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise Refused(f"not valid YAML: {' '.join(str(error).split())}. Fix: delete the character") from None
    if builder.root is None:
        raise Refused("the file is empty. Fix: state a key, such as 'mode: strict' in a policy").at(Node(1, 1))
    return builder.root


#: Fixes of YAML texts, by words of the problem or of its context; the first that matches counts. `first` and `column`
#: name the place where the construct begins.
_YAML_FIXES = (
    ("flow mapping", "close the '{{' of line {first} with '}}'"),
    ("flow sequence", "close the '[' of line {first} with ']'"),
    ("block mapping", "begin the line in column {column}, as the keys from line {first} do"),
    ("block collection", "begin the line with '- ' in column {column}, as line {first} does"),
    ("mapping values", "begin the line in the column of the key above it"),
    ("simple key", "write line {first} as 'key: value'"),
    ("end of stream", "close the quote of line {first}"),
    ("escape character", "write the text of line {first} in single quotes"),
    ("", "write each line as 'key: value'"),
)
_NEEDS_QUOTES = re.compile("[>|*&!%@`]|block scalar|alias|anchor|tag")


def _not_yaml(error: Any, text: str) -> Refused:
    mark = error.problem_mark or error.context_mark
    began, lines = error.context_mark or mark, [*(line.strip() for line in text.split("\n")), ""]
    key, _, value = lines[mark.line].removeprefix("- ").partition(": ")
    words = f"{error.problem}" + (f" ({error.context})" if error.context else "")
    sign = text[mark.index : mark.index + 1]
    if sign == "\t":
        fix = "indent with spaces, not with tabs"
    elif value[:1] not in ("", "{", "[") and (
        _NEEDS_QUOTES.search(sign + words)
        or ("mapping values" in words and ": " in value)
        or ("block mapping" in words and began.line == mark.line)
    ):
        fix = f"write {key[:40]}: {json.dumps(value[:40], ensure_ascii=False)}"
    elif "mapping values" in words and ":" not in lines[mark.line - 1]:
        fix = f"write line {mark.line} as 'key: value'"
    else:
        fix = next(fix for sign, fix in _YAML_FIXES if sign in words)
        fix = fix.format(first=began.line + 1, column=began.column + 1)
        above = text.split("\n")[mark.line - 1]
        inner = len(above) - len(above.lstrip())
        if "block mapping" in words and 0 <= began.column < mark.column < inner:
            fix += f", or in column {inner + 1}, as line {mark.line} does"
    return Refused(f"not valid YAML: {words}. Fix: {fix}").at(Node(mark.line + 1, mark.column + 1))


class _Builder:
    """Puts parser events together, with a stack instead of recursion."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self._open: list[SequenceNode | MappingNode] = []
        self._keys: list[ScalarNode | None] = []  # the key that waits for its value, one for each open collection
        self._documents = 0

    def take(self, event: Any) -> None:
        kind = type(event).__name__
        here = Node(event.start_mark.line + 1, event.start_mark.column + 1)
        if kind == "AliasEvent":
            raise Refused(
                f"alias '*{event.anchor}' is not allowed: in a policy each value is written where it is used. "
                f'Fix: write the value, or a pattern as "*{event.anchor}"'
            ).at(here)
        if getattr(event, "anchor", None):
            raise Refused(
                f"anchor '&{event.anchor}' is not allowed: in a policy each value is written where it is used. "
                f"Fix: delete '&{event.anchor}'"
            ).at(here)
        if getattr(event, "tag", None):
            raise Refused(
                f"tag {quote(event.tag)} is not allowed: a policy holds plain text, numbers, lists and mappings. "
                "Fix: delete it"
            ).at(here)
        if kind == "DocumentStartEvent":
            self._documents += 1
            if self._documents > 1:
                raise Refused("a second document starts here. Fix: delete the line '---', or make a file of each").at(
                    here
                )
        elif kind == "ScalarEvent":
            plain = event.style is None or event.style == ""
            value = core_value(event.value) if plain else event.value
            self._add(ScalarNode(here.line, here.column, value, None if value is None else event.value, plain))
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            if len(self._open) >= MAX_DEPTH:
                raise too_deep(here)
            node: SequenceNode | MappingNode
            node = (
                MappingNode(here.line, here.column, {}) if kind[0] == "M" else SequenceNode(here.line, here.column, [])
            )
            self._refuse_as_key(node)
            self._open.append(node)
            self._keys.append(None)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._keys.pop()
            self._add(self._open.pop())

    def _refuse_as_key(self, node: Node) -> None:
        if self._open and isinstance(self._open[-1], MappingNode) and self._keys[-1] is None:
            raise Refused("a key must be a name, not a list or a mapping. Fix: write a key such as 'mode'").at(node)

    def _add(self, node: Node) -> None:
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        if isinstance(parent, SequenceNode):
            parent.items.append(node)
            return
        key = self._keys[-1]
        if key is None:
            assert isinstance(node, ScalarNode)
            if node.text is None:
                raise Refused("a key must be a name, got nothing. Fix: write a key such as 'mode'").at(node)
            self._keys[-1] = node
            if node.text in parent.entries:
                parent.add(node, node.text, node)  # refuses, at the key
        else:
            assert key.text is not None
            parent.add(key, key.text, node)
            self._keys[-1] = None


def write_yaml(value: dict[str, Any]) -> str:
    """Write plain dicts, lists and scalars as YAML that reads back to the same values."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes every text that is not plainly a word."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the name is PyYAML's
            return True

    def write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = None if _SAFE_PLAIN.fullmatch(text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    written: str = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**9
    )
    return written
