# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`settled_order`: the nodes of an optimised graph in an order that is the same in every load."""

from __future__ import annotations

import heapq
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView

__all__ = ["settled_order"]

#: What ONNX Runtime numbers in the order in which it inserts it.
_NUMBERED = re.compile(r"_token_\d+|_\d+$")


def settled_order(graph: GraphView) -> list[NodeView]:
    """Return the nodes in an order that is the same in every load: each after what it reads, then by name.

    ONNX Runtime orders and numbers what it inserts anew each time.
    """
    waiting = {node.position: {key for key in node.inputs if key in graph.producers} for node in graph.nodes}
    readers: dict[str, list[NodeView]] = {}
    for node in graph.nodes:
        for key in waiting[node.position]:
            readers.setdefault(key, []).append(node)
    ready = [(_settled_name(node), node.position, node) for node in graph.nodes if not waiting[node.position]]
    heapq.heapify(ready)
    found: list[NodeView] = []
    while ready:
        node = heapq.heappop(ready)[2]
        found.append(node)
        for key in node.outputs:
            for reader in readers.pop(key, ()):
                waiting[reader.position].discard(key)
                if not waiting[reader.position]:
                    heapq.heappush(ready, (_settled_name(reader), reader.position, reader))
    seen = {node.position for node in found}
    return found + [node for node in graph.nodes if node.position not in seen]  # none, in a graph without cycles


def _settled_name(node: NodeView) -> tuple[str, ...]:
    """Return what orders nodes: their names without the numbers that ONNX Runtime gives out."""
    return (*(_NUMBERED.sub("", key) for key in (*node.outputs, *node.inputs)), node.op)
