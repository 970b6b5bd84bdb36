# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Work at borders, counted: copies between devices, inserted casts and layout changes, islands of CPU nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.observing.facts import provider_device
from xpuruntime.engines.onnxruntime.observing.node_matching import COPIES
from xpuruntime.engines.precision.names import precision_name
from xpuruntime.evidence.records import Boundary, Time

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Literal

    from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent

__all__ = ["boundaries_of"]

_LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})
_CPU = "CPUExecutionProvider"


def boundaries_of(
    graph: GraphView, seen: dict[int, NodeEvent], inserted: Collection[int], device: str
) -> tuple[Boundary, ...]:
    """Return the boundaries of one run, longest first within a kind."""
    groups: dict[tuple[Literal["copy", "cast", "layout"], str], list[NodeEvent]] = {}
    for node in graph.nodes:
        event = seen.get(node.position)
        if event is None:
            continue
        if node.op in COPIES:
            ends = ("cpu", device) if node.op == "MemcpyFromHost" else (device, "cpu")
            groups.setdefault(("copy", f"{ends[0]} -> {ends[1]}"), []).append(event)
        elif node.op == "Cast" and node.position in inserted:
            read = precision_name(event.inputs[0].dtype) if event.inputs else "?"
            written = precision_name(event.outputs[0].dtype) if event.outputs else "?"
            place = provider_device(event.provider, device)
            groups.setdefault(("cast", f"{read} -> {written} on {place}"), []).append(event)
        elif node.op in _LAYOUT and (node.position in inserted or node.domain == "com.microsoft.nchwc"):
            groups.setdefault(("layout", f"{node.op} on {provider_device(event.provider, device)}"), []).append(event)
    found = [_boundary(kind, where, events) for (kind, where), events in groups.items()]
    found += _islands(graph, seen)
    order = ("copy", "cast", "layout", "cpu_island", "sync")
    return tuple(sorted(found, key=lambda b: (order.index(b.kind), -(b.time.value if b.time else 0.0), b.where)))


def _boundary(kind: Literal["copy", "cast", "layout"], where: str, events: list[NodeEvent]) -> Boundary:
    return Boundary(
        kind=kind,
        where=where,
        count=sum(e.calls for e in events),
        bytes=sum(e.output_bytes * e.calls for e in events),
        time=_sum(events),
    )


def _sum(events: Iterable[NodeEvent]) -> Time | None:
    events = list(events)
    if not events:
        return None
    times = [event.time for event in events]
    return Time(value=sum(one.value for one in times), unit="us", kind=times[0].kind, runs=times[0].runs)


def _islands(graph: GraphView, seen: dict[int, NodeEvent]) -> list[Boundary]:
    """Return the connected groups of CPU nodes in a session that also runs elsewhere."""
    if {e.provider for e in seen.values()} <= {_CPU}:
        return []
    cpu = {n.position: n for n in graph.nodes if n.position in seen and seen[n.position].provider == _CPU}
    islands: list[Boundary] = []
    done: set[int] = set()
    for start in cpu:
        if start in done:
            continue
        done.add(start)
        group, bytes_copied, copies = [cpu[start]], 0, set()
        for node in group:
            for other in _neighbours(graph, node):
                if other.op in COPIES and other.position in seen and other.position not in copies:
                    copies.add(other.position)
                    bytes_copied += seen[other.position].output_bytes * seen[other.position].calls
                elif other.position in cpu and other.position not in done:
                    done.add(other.position)
                    group.append(other)
        group.sort(key=lambda n: n.position)
        ops = ", ".join(dict.fromkeys(n.op for n in group))
        span = group[0].name if len(group) == 1 else f"{group[0].name} .. {group[-1].name}"
        islands.append(
            Boundary(
                kind="cpu_island",
                where=f"{span} ({ops})",
                count=len(group),
                bytes=bytes_copied if copies else None,
                time=_sum(seen[n.position] for n in group),
            )
        )
    return islands


def _neighbours(graph: GraphView, node: NodeView) -> list[NodeView]:
    above = [graph.producers[k] for k in node.inputs if k in graph.producers]
    return above + [n for k in node.outputs for n in graph.consumers.get(k, ())]
