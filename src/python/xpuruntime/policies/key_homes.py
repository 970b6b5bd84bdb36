# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Homes of keys: where a key that is unknown in one section belongs, by the tables of kinds."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from xpuruntime.policies.compound_kinds import ListOf, Nested
from xpuruntime.policies.refusal import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.policies.kinds import Kind

__all__ = ["home_in_file", "home_in_python"]


def home_in_file(key: str, kinds: dict[str, Kind]) -> str | None:
    """Return the end of a message for an unknown key that a file with these keys has in another section."""
    homes = [name for name, section in _sections("", kinds) if key in section]
    if not homes:
        return None
    return f"; it belongs in {' or '.join(quote(home) if home else 'the top level of the file' for home in homes)}."


def home_in_python(key: str, cls: Any) -> str | None:
    """Return the end of a message for an unknown key that another class of the value that `cls` is of has."""
    homes = [home for root in cls.ROOTS if cls in _classes(root) for home in _calls(root).get(key, ())]
    return f"; write {' or '.join(homes)}." if homes else None


def _sections(name: str, kinds: dict[str, Kind]) -> Iterator[tuple[str, dict[str, Kind]]]:
    """Yield every mapping that a file can hold, by its dotted name; the top is ``""``."""
    yield name, kinds
    for key, kind in kinds.items():
        suffix, inner = _inner(kind)
        if inner is not None:
            yield from _sections(f"{name}.{key}{suffix[0]}" if name else f"{key}{suffix[0]}", inner.kinds)


@functools.cache
def _calls(root: Any) -> dict[str, list[str]]:
    """Return the calls of Python that state each key: ``"Policy(execution=ExecutionPolicy(engine=...))"``."""
    found: dict[str, list[str]] = {}

    def walk(cls: Any, before: str, after: str) -> None:
        before, after = f"{before}{cls.__name__}(", f"){after}"
        for key, kind in cls.KINDS.items():
            found.setdefault(key, []).append(f"{before}{key}=...{after}")
            suffix, inner = _inner(kind)
            if inner is not None:
                walk(inner.cls, f"{before}{key}={suffix[1]}", f"{suffix[2]}{after}")

    walk(root, "", "")
    return found


@functools.cache
def _classes(root: Any) -> frozenset[Any]:
    inner = [one.cls for _, one in map(_inner, root.KINDS.values()) if one is not None]
    return frozenset((root,)).union(*map(_classes, inner))


def _inner(kind: Kind) -> tuple[tuple[str, str, str], Nested | None]:
    """Return the values of a key, if they are mappings, and how they are written in a file and in Python."""
    if isinstance(kind, Nested):
        return ("", "", ""), kind
    item = getattr(kind, "item", None)
    marks = ("[]", "[", "]") if isinstance(kind, ListOf) else (".NAME", "{NAME: ", "}")
    return marks, item if isinstance(item, Nested) else None
