# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records of rewriting: the nodes that are rewritten, and those that are left to ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "DOMAIN",
    "Form",
    "FoundRewrites",
    "KernelRequest",
    "NewTranspose",
    "Rewrite",
    "RewriteCandidate",
    "UnrewrittenNode",
    "by_key",
]

#: The domain of xpuruntime's operators, version 1.
DOMAIN = "xpuruntime"


class KernelRequest(NamedTuple):
    """What a policy asks of one node."""

    words: tuple[str, ...]
    key: str
    keys: tuple[str, ...] = ()
    rest: str = ""


class NewTranspose(msgspec.Struct, frozen=True):
    """A Transpose that is put before a rewritten node: ``made = Transpose(source, perm)``."""

    name: str
    source: str
    perm: tuple[int, ...]
    made: str


class Form(NamedTuple):
    """One way to write a part of a graph as one of xpuruntime's operators."""

    op: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]
    nodes: tuple[str, ...]
    describe: Callable[[int], dict[str, Any]]
    before: tuple[NewTranspose, ...] = ()


class RewriteCandidate(NamedTuple):
    """A node that one of xpuruntime's operators could replace, or why none can."""

    node: str
    op: str
    op_type: str
    dtype: str | None
    sizes: dict[str, int | None]
    forms: tuple[Form, ...] = ()
    refusal: str = ""


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One node that becomes an xpuruntime operator."""

    node: str
    graph: str
    kind: str
    op: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]
    nodes: tuple[str, ...]
    before: tuple[NewTranspose, ...] = ()
    words: tuple[str, ...] = ()
    key: str = ""
    keys: tuple[str, ...] = ()
    rest: str = ""

    def __str__(self) -> str:
        """Return it in one line, without the node's name."""
        folded = [name for name in self.nodes if name != self.node]
        shown = ", ".join(folded[:4]) + (f" and {len(folded) - 4} more" if len(folded) > 4 else "")
        text = f"{DOMAIN}.{self.op}" + (f" with {shown}" if folded else "")
        text += f" by {', '.join(self.words)} ({self.key})"
        return text + (f"; {self.rest}" if self.rest else "")


class UnrewrittenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that a policy asks an xpuruntime kernel for and that stays with ONNX Runtime, with the reason."""

    node: str
    kind: str
    words: tuple[str, ...]
    key: str
    keys: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        """Return it in one line, without the node's name."""
        return f"stays with ONNX Runtime, although {self.key} asks for {', '.join(self.words)}: {self.reason}"


class FoundRewrites(NamedTuple):
    """What `find_rewrites` found."""

    rewrites: tuple[Rewrite, ...] = ()
    left: tuple[UnrewrittenNode, ...] = ()
    free: tuple[Rewrite, ...] = ()


T = TypeVar("T", Rewrite, UnrewrittenNode)


def by_key(found: Iterable[T]) -> dict[str, list[T]]:
    """Return what was found for nodes, by each policy key that may ask for their kernels."""
    grouped: dict[str, list[T]] = {}
    for one in found:
        for key in one.keys:
            grouped.setdefault(key, []).append(one)
    return grouped
