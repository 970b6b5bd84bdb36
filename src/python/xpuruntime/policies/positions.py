# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`position_of`: the line and column at which a document states a key."""

from __future__ import annotations

from xpuruntime.policies.document import MappingNode, Node, SequenceNode

__all__ = ["position_of"]


def position_of(root: Node, key: str) -> tuple[int, int] | None:
    """Return line and column, from 1, of a dotted key as `Policy.stated` names it.

    Where the document states only what the key is inside of, that place is returned; ``None`` where not even that.
    """
    if key == "kernels.auto_strategy":
        key = "auto_strategy"
    found = _find(root, key)
    return None if found is None or not found.line else (found.line, found.column)


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
