# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences in peak memory, in CUDA graphs, and in the shapes that two reports saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.report_comparison import GraphChange, MemoryChange, ShapeChange
from xpuruntime.evidence.sections.memory_over_time import most_by_owner, most_live

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.evidence.report import Report

__all__ = ["compare_graphs", "compare_peaks", "compare_shapes", "untold"]

_LIVE = "tensors between units"


def compare_peaks(before: Report, after: Report, noise: float) -> tuple[MemoryChange, ...]:
    """Return the most bytes of each owner during the pass, where they differ by more than this share of the first.

    What the operating system counts is never twice the same. Tensors between units are counted, not measured: any
    difference is reported.
    """
    found: list[MemoryChange] = []
    if before.memory_over_time and after.memory_over_time:
        sides = [most_by_owner(one.memory_over_time) for one in (before, after)]
        for owner in dict.fromkeys((*sides[0], *sides[1])):
            held = [side[owner][0] if owner in side else None for side in sides]
            if held[0] is None or held[1] is None or abs(held[1] - held[0]) > noise * held[0]:
                found.append(MemoryChange(owner=owner, before=held[0], after=held[1]))
    live = [most_live(one.live) for one in (before, after)]
    if live[0] is not None and live[1] is not None and live[0].during != live[1].during:
        found.append(MemoryChange(owner=_LIVE, before=live[0].during, after=live[1].during))
    return tuple(found)


def compare_graphs(before: Report, after: Report) -> GraphChange | None:
    """Return what differs about CUDA graphs; ``None`` where nothing does, or a report does not say."""
    a, b = before.cuda_graph, after.cuda_graph
    if a is None or b is None:
        return None
    nodes = [{one.node: one.op for one in side.blockers} for side in (a, b)]
    gone = tuple(f"{node} ({op})" for node, op in nodes[0].items() if node not in nodes[1])
    came = tuple(f"{node} ({op})" for node, op in nodes[1].items() if node not in nodes[0])
    if a.status == b.status and not gone and not came:
        return None
    return GraphChange(
        status_before=a.status, status_after=b.status, blockers_gone=gone, blockers_new=came, reason=b.reason
    )


def compare_shapes(before: Report, after: Report) -> tuple[ShapeChange, ...]:
    """Return the inputs of which other shapes are allowed, or were run."""
    if before.shapes is None or after.shapes is None:
        return ()
    sides = [{one.input: one for one in side.inputs} for side in (before.shapes, after.shapes)]
    found = []
    for name in dict.fromkeys((*sides[0], *sides[1])):
        a, b = sides[0].get(name), sides[1].get(name)
        pairs = [(one.allowed, one.observed) if one is not None else ("-", "-") for one in (a, b)]
        if pairs[0] != pairs[1]:
            found.append(
                ShapeChange(
                    input=name,
                    allowed_before=pairs[0][0],
                    allowed_after=pairs[1][0],
                    observed_before=pairs[0][1],
                    observed_after=pairs[1][1],
                )
            )
    return tuple(found)


def untold(before: Report, after: Report, names: Sequence[str]) -> str | None:
    """Return a note where one report alone has memory over time, CUDA graphs or shapes."""
    tells = [
        {
            "memory over time": bool(one.memory_over_time),
            "CUDA graphs": one.cuda_graph is not None,
            "shapes": one.shapes is not None,
        }
        for one in (before, after)
    ]
    lacking = [(i, what) for what in tells[0] for i in (0, 1) if tells[1 - i][what] and not tells[i][what]]
    if not lacking:
        return None
    which = lacking[0][0]
    words = ", ".join(what for i, what in lacking if i == which)
    return f"'{names[which]}' does not have {words}, such as a report of an older version: not compared"
