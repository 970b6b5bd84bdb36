# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Groups of the units of two reports, by the source nodes that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xpuruntime.evidence.records import Unit

__all__ = ["NodeGroup", "group_units"]


class NodeGroup(NamedTuple):
    """The least set of source nodes that whole units of both reports stand for.

    `before` and `after` are the units of the first and of the second report: those that account for these nodes, then
    those that are steps of them. The group without nodes holds what the engines inserted for none.
    """

    nodes: tuple[str, ...]
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]


def group_units(before: Sequence[Unit], after: Sequence[Unit]) -> list[NodeGroup]:
    """Return the connected components of source nodes, where a unit connects all nodes that it stands for.

    A unit that serves several nodes in one report and is split in the other is so compared with all of its parts.
    Groups come in the order in which the first report names their nodes; the one without nodes comes last.
    """
    parents: dict[str, str] = {}
    for unit in (*before, *after):
        for node in unit.source_nodes:
            parents.setdefault(node, node)
            _join(parents, unit.source_nodes[0], node)
    members: dict[str, list[str]] = {}
    for node in parents:
        members.setdefault(_root(parents, node), []).append(node)
    sides = [_by_group(parents, units) for units in (before, after)]
    found = [
        NodeGroup(tuple(nodes), tuple(sides[0].get(root, ())), tuple(sides[1].get(root, ())))
        for root, nodes in members.items()
    ]
    inserted = [tuple(side.get(None, ())) for side in sides]
    if any(inserted):
        found.append(NodeGroup((), *inserted))
    return found


def _by_group(parents: dict[str, str], units: Iterable[Unit]) -> dict[str | None, list[Unit]]:
    groups: dict[str | None, list[Unit]] = {}
    steps: list[tuple[str | None, Unit]] = []
    for unit in units:
        if unit.source_nodes:
            groups.setdefault(_root(parents, unit.source_nodes[0]), []).append(unit)
        else:
            served = next((node for node in unit.serves if node in parents), None)
            steps.append((None if served is None else _root(parents, served), unit))
    for root, unit in steps:
        groups.setdefault(root, []).append(unit)
    return groups


def _root(parents: dict[str, str], node: str) -> str:
    while parents[node] != node:
        parents[node] = parents[parents[node]]
        node = parents[node]
    return node


def _join(parents: dict[str, str], one: str, other: str) -> None:
    first, second = _root(parents, one), _root(parents, other)
    if first != second:
        parents[second] = first
