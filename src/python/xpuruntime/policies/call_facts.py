# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Facts of one call that kernel rules match, and the conditions of rules: ranges of numbers, patterns of names."""

from __future__ import annotations

import enum
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from xpuruntime.policies.document import Refused, describe_value, quote
from xpuruntime.policies.kinds import Text

T = TypeVar("T")


class Unknown(enum.Enum):
    """The type of `UNKNOWN`."""

    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return "UNKNOWN"


#: A property that the call has, or may have, and whose value is unknown.
UNKNOWN: Final = Unknown.UNKNOWN
#: A value; ``None`` where the call has no such property; `UNKNOWN`.
Fact: TypeAlias = T | Unknown | None

#: Operation to the sizes that its calls have.
SIZES: Final[dict[str, tuple[str, ...]]] = {"matmul": ("m", "n", "k"), "attention": ("head_dim", "kv")}


class CallFacts(NamedTuple):
    """The properties of one call, or of a node of a graph, that kernel rules match.

    Each is a value, ``None`` where the call has no such property, or `UNKNOWN`. A key that a rule states is never met
    by ``None``, and may be met by `UNKNOWN`. Each source of calls has one function that makes these; see
    ``docs/design/rules.md``.
    """

    op: Fact[str] = None
    m: Fact[int] = None
    n: Fact[int] = None
    k: Fact[int] = None
    head_dim: Fact[int] = None
    kv: Fact[int] = None
    dtype: Fact[str] = None
    device: Fact[str] = None
    arch: Fact[str] = None
    node: Fact[str] = None
    module: Fact[str] = None
    phase: Fact[str] = None


#: The facts of a call of which nothing is known.
ANY_CALL: Final = CallFacts(*[UNKNOWN] * len(CallFacts._fields))


def unknown_sizes(op: str) -> dict[str, Unknown]:
    """Return the sizes that calls of an operation have, all unknown."""
    return dict.fromkeys(SIZES.get(op, ()), UNKNOWN)


_MOST = 2**63 - 1
_BOUND = r"(<=|>=|<|>)\s*([0-9]{1,19})"
_SPAN = r"([0-9]{1,19})\s*\.\.\s*([0-9]{1,19})"


class IntRange(Text):
    """A whole number, or a condition: ``"<=16"``, ``"<16"``, ``">=128"``, ``">128"``, ``"1..64"`` (both ends in)."""

    def __init__(self, doc: str) -> None:
        super().__init__(doc, what="a whole number such as 16, or a condition such as '<=16', '>=128' or '1..64'")
        self.optional = True

    def _check(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value <= _MOST:
                raise Refused(f"{describe_value(value)} is out of range. Fix: state {self.expects()}")
            return int(value)
        text = super()._check(value).strip()
        if re.fullmatch("[0-9]{1,19}", text):
            return self._check(int(text))
        if (bound := re.fullmatch(_BOUND, text)) is not None:
            return f"{bound[1]}{self._check(int(bound[2]))}"
        if (span := re.fullmatch(_SPAN, text)) is not None:
            first, last = self._check(int(span[1])), self._check(int(span[2]))
            if first > last:
                raise Refused(f"{quote(text)} is an empty range. Fix: write '{last}..{first}'")
            return f"{first}..{last}"
        raise Refused(f"{quote(text)} is not a condition. Fix: state {self.expects()}")

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
    if (span := re.fullmatch(_SPAN, condition)) is not None:
        return int(span[1]), int(span[2])
    bound = re.fullmatch(_BOUND, condition)
    assert bound is not None
    number = int(bound[2])
    if bound[1] == "<=":
        return 0, number
    if bound[1] == "<":
        return 0, number - 1
    if bound[1] == ">=":
        return number, _MOST
    return (number + 1, _MOST) if number < _MOST else (1, 0)


_WILDCARDS = frozenset("*?[")
_ESCAPED = r"\[([*?[])\]"
_LITERAL = r"(?:[^*?[]|\[[*?[]\])*"


def escape(name: str) -> str:
    """Return the pattern that matches only this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def literal_of(pattern: str) -> str | None:
    """Return the only name that a pattern matches; ``None`` where it has wildcards."""
    if _WILDCARDS.isdisjoint(pattern):
        return pattern
    return re.sub(_ESCAPED, r"\1", pattern) if re.fullmatch(_LITERAL, pattern) else None


def literal_prefix(pattern: str) -> str:
    """Return the text with which every name that a pattern matches begins."""
    leading = re.match(_LITERAL, pattern)
    return re.sub(_ESCAPED, r"\1", leading[0]) if leading else ""


class Glob:
    """A pattern as of `fnmatch.fnmatchcase`, compiled at the first name."""

    __slots__ = ("_match", "_pattern")

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._match: Callable[[str], Any] | None = None

    def __call__(self, name: str) -> bool:
        """Say whether a name matches."""
        if self._match is None:
            import fnmatch

            self._match = re.compile(fnmatch.translate(self._pattern)).match
        return self._match(name) is not None


class NameSet:
    """Names, sorted, so that a pattern is compared only with those that begin as it does."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._sorted = sorted(self._names)

    def matching(self, pattern: str) -> Iterator[str]:
        """Yield the names that a pattern matches, sorted."""
        literal = literal_of(pattern)
        if literal is not None:
            if literal in self._names:
                yield literal
            return
        prefix, glob = literal_prefix(pattern), Glob(pattern)
        for index in range(bisect_left(self._sorted, prefix), len(self._sorted)):
            name = self._sorted[index]
            if not name.startswith(prefix):
                return
            if glob(name):
                yield name

    def matches(self, pattern: str) -> bool:
        """Say whether a pattern matches any of the names."""
        return next(self.matching(pattern), None) is not None
