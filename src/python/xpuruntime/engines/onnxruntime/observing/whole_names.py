# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of nodes in a profile that holds the beginning of a name only: made whole where there is no doubt."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.onnxruntime.observing.graph import GraphView
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent

__all__ = ["of_whole_names"]


def of_whole_names(graph: GraphView, events: Sequence[NodeEvent]) -> list[NodeEvent]:
    """Return the events whose node is known beyond doubt, with its whole name.

    An event of which no node has the name and the operator belongs to the one node of that operator whose name begins
    so. Where that may be several, or where more events than nodes have a name, they are left out.
    """
    nodes = Counter((node.name.partition("#")[0], node.op) for node in graph.nodes)
    said = Counter((event.name, event.op) for event in events)
    found = []
    for event in events:
        key = (event.name, event.op)
        if key in nodes or event.name == f"{event.op}_{event.index}":
            if said[key] <= nodes.get(key, said[key]):
                found.append(event)
            continue
        longer = [name for name, op in nodes if op == event.op and name.startswith(event.name)]
        if not longer:
            found.append(event)  # of an operator that the graph calls otherwise
        elif len(longer) == said[key] == 1 and (longer[0], event.op) not in said:
            found.append(msgspec.structs.replace(event, name=longer[0]))
    return found
