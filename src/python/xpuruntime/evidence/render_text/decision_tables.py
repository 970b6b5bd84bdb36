# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions about kernels as the terminal shows them: what served each call, and what became of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from xpuruntime.evidence.kernels.decisions import KernelDecision
    from xpuruntime.evidence.report_comparison import DecisionChange

__all__ = ["call_at", "call_text", "changed_decisions", "decision_tables", "why_text"]

_OWN = "the engine's own"
_ROWS = 12
_STYLE = {"fallback": "bold red"}
_WHY = {
    "pinned": "as asked",
    "rule": "as a rule asks",
    "tuned": "by measured times",
    "first": "the first that can",
    "fallback": "instead of what was asked",
}


def decision_tables(decisions: Sequence[KernelDecision], title: str) -> list[RenderableType]:
    """Return a table of what served, and one of the kernels that did not, with the reasons."""
    from rich.text import Text

    if not decisions:
        return []
    served = table(title, ("call", "asked", "ran", "why", ">calls"))
    order = sorted(decisions, key=lambda one: (one.source != "fallback", -(one.count or 0)))
    for one in order[:_ROWS]:
        served.add_row(
            Text(call_text(one)),
            Text(", ".join(one.asked)),
            Text(one.kernel or _OWN),
            Text(why_text(one), style=_STYLE.get(one.source, "")),
            "-" if one.count is None else f"{one.count:,}",
        )
    parts: list[RenderableType] = [served]
    if len(order) > _ROWS:
        parts.append(Text(f"and {len(order) - _ROWS} more kinds of calls: all of them are in the JSON"))
    return [*parts, *_others(order)]


def changed_decisions(changes: Sequence[DecisionChange]) -> list[RenderableType]:
    """Return a table of the calls that another kernel serves, and why."""
    from rich.text import Text

    made = table("calls that another kernel serves", ("call", "before", "after", "asked"))
    for one in changes[:_ROWS]:
        asked = [f"{words} ({key})" for words, key in _asked(one)]
        made.add_row(
            Text(call_at(one.description or one.op, one.nodes)),
            Text(one.kernel_before),
            Text(one.kernel_after),
            Text(" -> ".join(dict.fromkeys(asked))),
        )
    parts: list[RenderableType] = [made]
    if len(changes) > _ROWS:
        parts.append(Text(f"and {len(changes) - _ROWS} more: all of them are in the JSON"))
    return [*parts, *(Text(text) for text in dict.fromkeys(one.reason for one in changes[:_ROWS]) if text)]


def _asked(one: DecisionChange) -> list[tuple[str, str]]:
    return [(one.asked_before, one.asked_by_before), (one.asked_after, one.asked_by_after)]


def call_text(one: KernelDecision) -> str:
    """Return operation, operands and the first node of a decision in one line."""
    return call_at(one.description, one.nodes or ((one.module,) if one.module else ()))


def call_at(text: str, places: Sequence[str]) -> str:
    """Return what a call is, with the first of the places where it is made."""
    if not places:
        return text
    return f"{text}; {places[0]}" + (f" + {len(places) - 1} more" if len(places) > 1 else "")


def why_text(one: KernelDecision) -> str:
    """Return by which key and how the choice was made."""
    return f"{_WHY[one.source]} ({one.asked_by})"


def _others(decisions: Sequence[KernelDecision]) -> list[RenderableType]:
    """Return why the other kernels did not run: what was measured first, then what cannot serve."""
    from rich.text import Text

    found: dict[tuple[str, str, str, float | None], None] = {}
    for one in decisions:
        for other in one.candidates:
            if other.reason or other.measured_us is not None:
                found[other.kernel, one.op, other.reason or "ran", other.measured_us] = None
    if not found:
        return []
    asked = {word.partition("@")[0] for one in decisions for word in one.asked}

    def weight(row: tuple[str, str, str, float | None]) -> tuple[bool, bool]:
        kernel = row[0].partition("@")[0]
        return row[3] is None, not {kernel, kernel.partition(".")[0]} & asked

    order = sorted(found, key=weight)
    others = table("what else was considered, and what was measured", ("kernel", "of", "what became of it", ">us"))
    for kernel, op, reason, spent in order[:_ROWS]:
        others.add_row(Text(kernel), op, Text(reason), "-" if spent is None else f"{spent:,.2f}")
    if len(order) <= _ROWS:
        return [others]
    return [others, Text(f"and {len(order) - _ROWS} more: all of them are in the JSON")]
