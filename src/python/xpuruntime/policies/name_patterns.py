# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Glob` and `NameSet`: patterns for the names of nodes and modules, and the names that a pattern matches."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Glob", "NameSet", "escape", "literal_of", "literal_prefix"]

_WILDCARDS = frozenset("*?[")
_ESCAPED = re.compile(r"\[([*?[])\]")
_LITERAL = re.compile(r"(?:[^*?[]|\[[*?[]\])*")


def escape(name: str) -> str:
    """Return the pattern that matches only this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def literal_of(pattern: str) -> str | None:
    """Return the only name that a pattern matches; ``None`` where it has wildcards."""
    if _WILDCARDS.isdisjoint(pattern):
        return pattern
    return _ESCAPED.sub(r"\1", pattern) if _LITERAL.fullmatch(pattern) else None


def literal_prefix(pattern: str) -> str:
    """Return the text with which every name that a pattern matches begins."""
    leading = _LITERAL.match(pattern)
    return _ESCAPED.sub(r"\1", leading[0]) if leading else ""


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
        for place in range(bisect_left(self._sorted, prefix), len(self._sorted)):
            name = self._sorted[place]
            if not name.startswith(prefix):
                return
            if glob(name):
                yield name

    def matches(self, pattern: str) -> bool:
        """Say whether a pattern matches any of the names."""
        return next(self.matching(pattern), None) is not None
