# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences in kernels: calls of one model that other xpuruntime kernels served in another report."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from xpuruntime.evidence.report_comparison import DecisionChange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.evidence.kernels.decisions import KernelDecision

__all__ = ["compare_decisions"]

_OWN = "the engine's own"


class _Call(NamedTuple):
    """What makes calls of two reports the same.

    An engine's own kernel reports no shapes: it is the only call of its node. Calls of no node go by operands.
    """

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
    sides = [_by_call(one) for one in (before, after)]
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
    found: dict[_Call, list[KernelDecision]] = {}
    for one in decisions:
        for node in one.nodes or ("",):
            alone = bool(node) and (one.chosen is None or not one.shapes)
            found.setdefault(_Call(node, one.op, "" if alone else one.description), []).append(one)
    return found


def _served(side: dict[_Call, list[KernelDecision]], call: _Call) -> list[KernelDecision]:
    """Return what served a call in one report; its engine's own kernel serves every call of the node."""
    return side.get(call) or side.get(_Call(call.node, call.op, "")) or []


def _kernels(decisions: Sequence[KernelDecision]) -> set[str | None]:
    return {one.kernel for one in decisions}


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
    return ", ".join(dict.fromkeys(one.kernel or _OWN for one in decisions))


def _reason(before: KernelDecision, after: KernelDecision) -> str:
    """Return why the second report does not have the kernel of the first; empty where it does not say."""
    if after.notes:
        return after.notes[0]
    for other in after.candidates:
        if other.kernel == before.kernel and other.reason:
            return f"{other.kernel}: {other.reason}"
    refused = [one for one in after.candidates if not one.accepted and one.id in after.asked]
    return f"{refused[0].id}: {refused[0].reason}" if refused else ""


def _with_node(change: DecisionChange, node: str) -> DecisionChange:
    return msgspec.structs.replace(change, nodes=(*change.nodes, node))
