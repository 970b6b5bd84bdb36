# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`render_changes`: what differs between two reports, as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.evidence.page.document import assemble
from xpuruntime.evidence.render_text.changes import change_text, units_text
from xpuruntime.evidence.render_text.decision_tables import call_at
from xpuruntime.evidence.render_text.section_tables import graph_change_rows, memory_change_rows, shape_change_rows
from xpuruntime.evidence.render_text.tables import arrow_text, bytes_text
from xpuruntime.notebook import escaped, fragment, fragment_table

if TYPE_CHECKING:
    from xpuruntime.evidence.report_comparison import GroupChange, ReportComparison

__all__ = ["render_changes"]

_PARTS = ("elements", "sorting", "changed", "shell", "changes")


def render_changes(comparison: ReportComparison) -> str:
    """Return the page. It says what `str(comparison)` says, of all groups of nodes."""
    name = comparison.after.model.replace("\\", "/").rpartition("/")[2] or "a model"
    data = _data(comparison)
    return assemble(
        "changes.html", "comparison", _PARTS, f"{comparison.headline} - {name}", data, _fragment(comparison, data)
    )


def _data(comparison: ReportComparison) -> dict[str, Any]:
    return {
        "headline": comparison.headline,
        "same": comparison.same,
        "sides": [msgspec.to_builtins(side) for side in (comparison.before, comparison.after)],
        "speeds": _speeds(comparison),
        "noise": f"{comparison.noise:.0%} or {comparison.noise_us:g} us".replace("%", " %"),
        "groups": [_group(group) for group in comparison.groups],
        "unchanged": comparison.unchanged,
        "only": [list(comparison.only_before), list(comparison.only_after)],
        "keys": [
            {
                "cells": [
                    key.key,
                    arrow_text(key.requested_before, key.requested_after),
                    arrow_text(key.observed_before, key.observed_after),
                    arrow_text(key.status_before, key.status_after),
                    key.reason,
                ],
                "deviates": key.deviates,
            }
            for key in comparison.keys
        ],
        "decisions": [
            [
                call_at(one.description or one.op, one.nodes),
                arrow_text(one.kernel_before, one.kernel_after),
                arrow_text(one.asked_before, one.asked_after),
                arrow_text(one.asked_by_before, one.asked_by_after),
                one.reason,
            ]
            for one in comparison.decisions
        ],
        "boundaries": [
            [
                one.kind,
                one.where,
                arrow_text(str(one.count_before), str(one.count_after)),
                arrow_text(_size(one.count_before, one.bytes_before), _size(one.count_after, one.bytes_after)),
                change_text(one.time),
            ]
            for one in comparison.boundaries
        ],
        "memory": [list(row) for row in memory_change_rows(comparison.memory)],
        "peaks": [list(row) for row in memory_change_rows(comparison.peaks)],
        "cuda_graph": [list(row) for row in graph_change_rows(comparison.cuda_graph)],
        "shapes": [list(row) for row in shape_change_rows(comparison.shapes)],
        "surroundings": [
            [one.name, *("-" if value is None else value for value in (one.before, one.after))]
            for one in comparison.surroundings
        ],
        "notes": list(comparison.notes),
    }


def _speeds(comparison: ReportComparison) -> list[list[str]]:
    named = [] if comparison.latency is None else [("latency, median", comparison.latency)]
    named += [(f"all units, {total.kind} time", total) for total in comparison.totals]
    return [[name, change_text(time), time.verdict] for name, time in named]


def _group(group: GroupChange) -> dict[str, Any]:
    time = group.time
    return {
        "nodes": list(group.nodes),
        "what": list(group.what),
        "before": units_text(group, group.before),
        "after": units_text(group, group.after),
        "time": None if time is None else {"before": time.before, "after": time.after, "unit": time.unit},
        "change": None if time is None else time.change,
        "verdict": "unknown" if time is None else time.verdict,
    }


def _size(count: int, size: int | None) -> str:
    return "0 B" if not count else bytes_text(size)


def _fragment(comparison: ReportComparison, data: dict[str, Any]) -> str:
    """Return headline, speed and keys, for browsers without scripts."""
    kind = "honoured" if comparison.same else "substituted"
    parts = [f"<p class='xrt-headline xrt-{kind}'>{escaped(comparison.headline)}</p>"]
    if data["speeds"]:
        parts.append(fragment_table("Speed", ("what", "change", "verdict"), [tuple(one) for one in data["speeds"]]))
    rows = [
        (
            ", ".join(one["nodes"][:4]) or "(inserted)",
            ", ".join(one["what"]) or one["verdict"],
            one["before"],
            one["after"],
        )
        for one in data["groups"][:20]
    ]
    if rows:
        title = f"Nodes ({len(rows)} of {len(data['groups'])} groups)"
        parts.append(fragment_table(title, ("nodes", "what", "before", "after"), rows))
    return fragment(parts)
