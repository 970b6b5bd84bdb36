# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Refused`: why a value is not accepted, and where, before it becomes a `PolicyError`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.policies.document import Node

__all__ = ["Refused", "did_you_mean", "nearest", "quote"]

_LONGEST_QUOTE = 60


class Refused(Exception):  # noqa: N818 - read as a sentence: `raise Refused(...)`
    """A value or key is refused. Private to this package: public calls turn it into `PolicyError`."""

    def __init__(self, reason: str, *path: str | int, unknown_key: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.unknown_key = unknown_key
        self.node: Node | None = None

    def under(self, *path: str | int) -> Refused:
        """Put `path` before what is already known of the place."""
        self.path = (*path, *self.path)
        return self

    def at(self, node: Node) -> Refused:
        """Remember the node of the document; the innermost, which comes first, stays."""
        if self.node is None:
            self.node = node
        return self

    def message(self, root: str = "", whole: str = "the policy") -> str:
        """Return the sentence with the dotted key, which starts with `root`, but without the place in a file.

        `whole` names the document where there is no key.
        """
        where = dotted((root, *self.path) if root else self.path)
        if self.unknown_key is not None:
            return f"unknown key {quote(self.unknown_key)} in {where or whole}{self.reason}"
        return f"{where}: {self.reason}" if where else self.reason


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
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.55)
    return plain[found[0]] if found else None


def did_you_mean(word: str, valid: Iterable[str], kind: str) -> str:
    """Return ``"; did you mean 'x'? Valid <kind>: ..."``, without the question when nothing is near."""
    words = list(valid)
    near = nearest(word, words)
    question = f"; did you mean {near!r}?" if near else "."
    return f"{question} Valid {kind}: {', '.join(words)}."


def _plain(word: str) -> str:
    return word.casefold().replace("-", "_")
