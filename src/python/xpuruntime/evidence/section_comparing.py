# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences of sections of two reports: kernel decisions, nodes, CUDA graphs, memory, shapes and surroundings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.memory_over_time import most_by_owner, most_live
from xpuruntime.evidence.report_comparison import DecisionChange, MemoryChange

if TYPE_CHECKING:
    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.evidence.records import Unit
    from xpuruntime.evidence.report import Report

_OWN = "the engine's own"


class _Call(NamedTuple):
    """What makes calls of two reports the same."""

    # An engine's own kernel reports no shapes: it is the only call of its node. Calls of no node go by operands.

    node: str
    op: str
    description: str


def compare_decisions(
    before: Sequence[KernelDecision], after: Sequence[KernelDecision]
) -> tuple[tuple[DecisionChange, ...], str | None]:
    """Return the calls that another kernel serves, and a note where they cannot be compared.

    Calls are the same that one node makes on operands of the same shapes and types. A node that the engine's own kernel
    serves in one of the reports is compared as a whole.
    """
    if not before and not after:
        return (), None
    if not before or not after:
        word, other = ("before", "after") if before else ("after", "before")
        return (), (
            f"kernel decisions are in '{word}' only: '{other}' has no xpuruntime kernels, or is by a version that "
            "does not record them"
        )
    sides = [_by_call(side) for side in (before, after)]
    changes: dict[tuple[object, ...], DecisionChange] = {}
    for call in dict.fromkeys((*sides[0], *sides[1])):
        a, b = (_served(side, call) for side in sides)
        if not a or not b or _kernels(a) == _kernels(b):
            continue
        change = _change(call, a, b)
        key = (change.op, change.description, change.kernel_before, change.kernel_after, change.reason)
        known = changes.get(key)
        if known is None:
            changes[key] = change
        elif call.node not in known.nodes:
            changes[key] = _with_node(known, call.node)
    return tuple(changes.values()), None


def _by_call(decisions: Sequence[KernelDecision]) -> dict[_Call, list[KernelDecision]]:
    kernel_decisions: dict[_Call, list[KernelDecision]] = {}
    for decision in decisions:
        for node in decision.nodes or ("",):
            alone = bool(node) and (decision.chosen is None or not decision.shapes)
            kernel_decisions.setdefault(_Call(node, decision.op, "" if alone else decision.description), []).append(
                decision
            )
    return kernel_decisions


def _served(side: dict[_Call, list[KernelDecision]], call: _Call) -> list[KernelDecision]:
    return side.get(call) or side.get(_Call(call.node, call.op, "")) or []


def _kernels(decisions: Sequence[KernelDecision]) -> set[str | None]:
    return {decision.kernel for decision in decisions}


def _change(call: _Call, before: Sequence[KernelDecision], after: Sequence[KernelDecision]) -> DecisionChange:
    a, b = before[0], after[0]
    return DecisionChange(
        nodes=(call.node,) if call.node else (),
        op=b.op,
        description=call.description,
        kernel_before=_named(before),
        kernel_after=_named(after),
        asked_before=", ".join(a.asked),
        asked_after=", ".join(b.asked),
        asked_by_before=a.asked_by,
        asked_by_after=b.asked_by,
        source_before=a.source,
        source_after=b.source,
        reason=_reason(a, b),
    )


def _named(decisions: Sequence[KernelDecision]) -> str:
    return ", ".join(dict.fromkeys(decision.kernel or _OWN for decision in decisions))


def _reason(before: KernelDecision, after: KernelDecision) -> str:
    if after.notes:
        return after.notes[0]
    for other in after.candidates:
        if other.kernel == before.kernel and other.reason:
            return f"{other.kernel}: {other.reason}"
    refused = [candidate for candidate in after.candidates if not candidate.accepted and candidate.id in after.asked]
    return f"{refused[0].id}: {refused[0].reason}" if refused else ""


def _with_node(change: DecisionChange, node: str) -> DecisionChange:
    return msgspec.structs.replace(change, nodes=(*change.nodes, node))


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
    groups = [
        NodeGroup(tuple(nodes), tuple(sides[0].get(root, ())), tuple(sides[1].get(root, ())))
        for root, nodes in members.items()
    ]
    inserted = [tuple(side.get(None, ())) for side in sides]
    if any(inserted):
        groups.append(NodeGroup((), *inserted))
    return groups


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


def _join(parents: dict[str, str], child: str, other: str) -> None:
    first, second = _root(parents, child), _root(parents, other)
    if first != second:
        parents[second] = first


_LIVE = "tensors between units"


def compare_peaks(before: Report, after: Report, noise: float) -> tuple[MemoryChange, ...]:
    """Return the most bytes of each owner during the pass, where they differ by more than this share of the first.

    What the operating system counts is never twice the same. Tensors between units are counted, not measured: any
    difference is reported.
    """
    changes: list[MemoryChange] = []
    if before.memory_over_time and after.memory_over_time:
        sides = [most_by_owner(side.memory_over_time) for side in (before, after)]
        for owner in dict.fromkeys((*sides[0], *sides[1])):
            held = [side[owner][0] if owner in side else None for side in sides]
            if held[0] is None or held[1] is None or abs(held[1] - held[0]) > noise * held[0]:
                changes.append(MemoryChange(owner=owner, before=held[0], after=held[1]))
    live = [most_live(side.live) for side in (before, after)]
    if live[0] is not None and live[1] is not None and live[0].during != live[1].during:
        changes.append(MemoryChange(owner=_LIVE, before=live[0].during, after=live[1].during))
    return tuple(changes)


def compare_graphs(before: Report, after: Report) -> tuple[Difference, ...]:
    """Return what differs about CUDA graphs; nothing where a report does not say."""
    a, b = before.cuda_graph, after.cuda_graph
    if a is None or b is None:
        return ()
    nodes = [{f"{blocker.node} ({blocker.op})" for blocker in side.blockers} for side in (a, b)]
    differences = [
        Difference(subject=name, code="blocker", before=states[0], after=states[1])
        for name in dict.fromkeys(f"{blocker.node} ({blocker.op})" for blocker in (*a.blockers, *b.blockers))
        if len(set(states := ["blocks" if name in side else None for side in nodes])) == 2
    ]
    if a.status == b.status and not differences:
        return ()
    return (Difference(subject="status", before=a.status, after=b.status, reason=b.reason), *differences)


def compare_shapes(before: Report, after: Report) -> tuple[Difference, ...]:
    """Return the inputs of which other shapes are allowed, or were run."""
    if before.shapes is None or after.shapes is None:
        return ()
    sides = [{input_.input: input_ for input_ in side.inputs} for side in (before.shapes, after.shapes)]
    differences = []
    for name in dict.fromkeys((*sides[0], *sides[1])):
        for code in ("allowed", "observed"):
            values = [getattr(side[name], code) if name in side else None for side in sides]
            if values[0] != values[1]:
                differences.append(Difference(subject=name, code=code, before=values[0], after=values[1]))
    return tuple(differences)


def untold(before: Report, after: Report, names: Sequence[str]) -> str | None:
    """Return a note where one report alone has memory over time, CUDA graphs or shapes."""
    tells = [
        {
            "memory over time": bool(report.memory_over_time),
            "CUDA graphs": report.cuda_graph is not None,
            "shapes": report.shapes is not None,
        }
        for report in (before, after)
    ]
    lacking = [(i, what) for what in tells[0] for i in (0, 1) if tells[1 - i][what] and not tells[i][what]]
    if not lacking:
        return None
    which = lacking[0][0]
    words = ", ".join(what for i, what in lacking if i == which)
    return f"'{names[which]}' does not have {words}, such as a report of an older version: not compared"


def surroundings(before: Report, after: Report) -> tuple[Difference, ...]:
    """Return what differs in the environment, the loaded libraries, the engine's version and its settings.

    Names have dots: ``packages.numpy``, ``variables.OMP_NUM_THREADS``, ``libraries.libcudart.so.13``,
    ``plan.engine_version``, ``settings.threads``. Settings are compared where the engine is the same.
    """
    alike = before.plan.get("engine") == after.plan.get("engine")  # else each has settings of its own
    sides = [dict(_facts(side, settings=alike)) for side in (before, after)]
    return tuple(
        Difference(subject=name, before=sides[0].get(name), after=sides[1].get(name))
        for name in dict.fromkeys((*sides[0], *sides[1]))
        if sides[0].get(name) != sides[1].get(name)
    )


def _facts(report: Report, *, settings: bool) -> Iterator[tuple[str, str]]:
    yield from _flat(report.environment, "")
    libraries: dict[str, list[str]] = {}
    for library in report.libraries:
        libraries.setdefault(library.name, []).append(
            f"{library.version} in {library.path}" if library.version else library.path
        )
    for name, places in libraries.items():
        yield f"libraries.{name}", ", ".join(sorted(places))
    for key in ("engine_version", "policy_source"):
        if report.plan.get(key) is not None:
            yield f"plan.{key}", str(report.plan[key])
    stated = report.plan.get("settings")
    if settings and isinstance(stated, dict):
        yield from _flat(stated, "settings.")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
