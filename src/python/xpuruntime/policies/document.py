# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The tree that a policy text is read into: values with their line and column.

Scalars keep both the value that the YAML 1.2 core schema gives them and their text, and the field that reads a scalar
takes the one it wants. So ``cuda_graph: off`` is the word "off", and ``tf32: off`` is false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

MAX_DEPTH = 64


class Node(msgspec.Struct):
    """A place in a document. `line` and `column` count from 1; 0 where the document has no text."""

    line: int
    column: int


class ScalarNode(Node):
    """A single value.

    `value` is typed; `text` is what a field that wants text reads, ``None`` where that would be a wrong type. `plain`
    is true for unquoted YAML, where a word such as ``off`` may also be a truth value.
    """

    value: Any
    text: str | None
    plain: bool = False


class SequenceNode(Node):
    """A list."""

    items: list[Node]


class MappingNode(Node):
    """A mapping: key to (place of the key, value)."""

    entries: dict[str, tuple[Node, Node]]

    def add(self, key_node: Node, key: str, value: Node) -> None:
        """Add an entry. Raises `Refused` when the key is there already."""
        if key in self.entries:
            first = self.entries[key][0]
            raise Refused(
                f"duplicate key {quote(key)}: it is already set on line {first.line}. Fix: delete one of the two"
            ).at(key_node)
        self.entries[key] = (key_node, value)


def too_deep(node: Node) -> Refused:
    """Return the refusal of a document that is nested too deeply."""
    return Refused(f"nested deeper than {MAX_DEPTH} levels; a policy needs at most 6. Fix: close what is open").at(node)


def describe(node: Node) -> str:
    """Say what a node is, for messages: ``"a list"``, ``"the number 3"``, ``"text 'x'"``."""
    if isinstance(node, SequenceNode):
        return "a list"
    if isinstance(node, MappingNode):
        return "a mapping"
    assert isinstance(node, ScalarNode)
    return describe_value(node.value)


def describe_value(value: Any) -> str:
    """Say what a Python value is, for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {quote(value)}"
    if isinstance(value, (int, float)):
        return f"the number {value}" if isinstance(value, float) or value.bit_length() < 200 else "a huge number"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple, set, frozenset)):
        return "a list"
    return f"a {type(value).__name__}"


def from_python(value: Any, depth: int = 0) -> Node:
    """Make a tree from dicts, lists and scalars. Raises `Refused` for what has no place in a policy."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return ScalarNode(0, 0, value, value if isinstance(value, str) else None)
    if isinstance(value, (Mapping, list, tuple)) and depth >= MAX_DEPTH:
        raise too_deep(Node(0, 0))
    if isinstance(value, Mapping):
        entries: dict[str, tuple[Node, Node]] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise Refused(
                    f"a key must be text, got {describe_value(key)}. Fix: write a key of the policy, such as 'mode'"
                )
            entries[key] = (Node(0, 0), _child(item, depth, key))
        return MappingNode(0, 0, entries)
    if isinstance(value, (list, tuple)):
        return SequenceNode(0, 0, [_child(item, depth, index) for index, item in enumerate(value)])
    raise Refused(
        f"{describe_value(value)} has no place in a policy. Fix: use text, numbers, true, false, lists and mappings"
    )


def _child(value: Any, depth: int, step: str | int) -> Node:
    try:
        return from_python(value, depth + 1)
    except Refused as refused:
        raise (refused.under(step) if depth < MAX_DEPTH // 2 else refused) from None


def to_python(node: Node) -> Any:
    """Return the plain dicts, lists and scalars of a tree, scalars as the core schema types them."""
    if isinstance(node, MappingNode):
        return {key: to_python(value) for key, (_, value) in node.entries.items()}
    if isinstance(node, SequenceNode):
        return [to_python(item) for item in node.items]
    assert isinstance(node, ScalarNode)
    return node.value


_LONGEST_QUOTE = 60
#: Faults that one error names, and after how many nobody looks for more.
_MOST_NAMED, _MOST_FOUND = 8, 100


class Refused(Exception):  # noqa: N818 - read as a sentence: `raise Refused(...)`
    """A value or key is refused. Private to this package: public calls turn it into `PolicyError`."""

    def __init__(self, reason: str, *path: str | int, unknown_key: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.unknown_key = unknown_key
        self.node: Node | None = None
        #: What else is refused in the same document, see `Refusals`.
        self.others: tuple[Refused, ...] = ()

    @property
    def everything(self) -> tuple[Refused, ...]:
        """The refusal and the others, none of which has others of its own."""
        return (self, *self.others)

    def under(self, *path: str | int) -> Refused:
        """Put `path` before what is already known of the place."""
        for refused in self.everything:
            refused.path = (*path, *refused.path)
        return self

    def at(self, node: Node) -> Refused:
        """Remember the node of the document; the innermost, which comes first, stays."""
        for refused in self.everything:
            if refused.node is None:
                refused.node = node
        return self

    def lines(self, line: Callable[[Refused], str]) -> str:
        """Return the text of an error with a line for each refusal, the first `_MOST_NAMED` of them."""
        lines = [line(refused) for refused in self.everything[:_MOST_NAMED]]
        more = len(self.everything) - len(lines)
        end = "" if len(self.everything) < _MOST_FOUND else ", where reading stopped"
        return "\n  ".join([*lines, *([f"and {more} more{end}"] if more else [])])

    def message(self, root: str = "", subject: str = "the policy") -> str:
        """Return the sentence with the dotted key, which starts with `root`, but without the place in a file.

        `whole` names the document where there is no key.
        """
        where = dotted((root, *self.path) if root else self.path)
        if self.unknown_key is not None:
            return f"unknown key {quote(self.unknown_key)} in {where or subject}{self.reason}"
        return f"{where}: {self.reason}" if where else self.reason


class Refusals:
    """Everything that is refused in one mapping or list, so that one error names it all."""

    def __init__(self) -> None:
        self._all: list[Refused] = []

    def add(self, refused: Refused) -> None:
        """Keep a refusal, with those that it has. Raises the first `Refused` once there are more than enough."""
        self._all += refused.everything[: _MOST_FOUND - len(self._all)]
        refused.others = ()
        if len(self._all) == _MOST_FOUND:
            self.raise_any()

    def raise_any(self) -> None:
        """Raise the first `Refused` with the others, if there is one."""
        if self._all:
            first, *others = self._all
            first.others = tuple(others)
            raise first


def dotted(path: Iterable[str | int]) -> str:
    """Write a path as policies name it: ``kernels.rules[0].match``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def quote(text: str) -> str:
    """Quote `text` for a message, shortened when long."""
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…")


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that `word` was probably meant to be, or ``None``."""
    import difflib

    if len(word) > _LONGEST_QUOTE:
        return None
    plain = {_plain(candidate): candidate for candidate in valid}
    other = _OTHER_NAMES.get(_plain(word))
    if other in plain:
        return plain[other]
    matches = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.55)
    return plain[matches[0]] if matches else None


#: Names of precisions elsewhere.
_OTHER_NAMES = {"float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "bfloat16": "bf16"}


def question(near: str | None, otherwise: str = "") -> str:
    """Return ``"; did you mean 'near'?"``, or what stands there otherwise."""
    return f"; did you mean {near!r}?" if near else otherwise


def did_you_mean(word: str, valid: Iterable[str], kind: str, *, near: str | None = None, more: str = "") -> str:
    """Return ``"; did you mean 'x'? Valid <kind>: .... Fix: write x"``, without the question when nothing is near.

    `near` is what is meant, where that is none of the words; `more` is what else is valid.
    """
    words = list(valid)
    near = near or nearest(word, words)
    return f"{question(near, '.')} Valid {kind}: {', '.join(words)}{more}. Fix: write {near or f'one of the {kind}'}"


def _plain(word: str) -> str:
    return word.casefold().replace("-", "_")


def position_of(root: Node, key: str) -> tuple[int, int] | None:
    """Return line and column, from 1, of a dotted key as `Policy.stated` names it.

    Where the document states only what the key is inside of, that place is returned; ``None`` where not even that.
    """
    if key == "kernels.auto_strategy":
        key = "auto_strategy"
    node = _find(root, key)
    return None if node is None or not node.line else (node.line, node.column)


def _find(node: Node, rest: str) -> Node | None:
    """Return the key of the deepest entry that `rest` leads to. Names may hold dots, so the longest is tried first."""
    if isinstance(node, SequenceNode) and rest.startswith("["):
        index, _, after = rest[1:].partition("]")
        if index.isdigit() and int(index) < len(node.items):
            item = node.items[int(index)]
            return _find(item, after.removeprefix(".")) or item
        return None
    if not isinstance(node, MappingNode) or not rest:
        return None
    for name in sorted(node.entries, key=len, reverse=True):
        if rest == name or rest.startswith((f"{name}.", f"{name}[")):
            key_node, value = node.entries[name]
            return _find(value, rest[len(name) :].removeprefix(".")) or key_node
    return None
