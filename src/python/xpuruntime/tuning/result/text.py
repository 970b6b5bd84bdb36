# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Terminal rendering of a search result. Every colour stands beside a word that says the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import table
from xpuruntime.measuring.statistics import CandidateCode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from rich.console import RenderableType

    from xpuruntime.tuning.result.tune_result import CandidateResult, TuneResult

__all__ = ["changes_text", "figure_text", "ranked", "render"]

_HEAD = {"winner": "bold green", "tied": "bold green", "none": "bold red", "undecided": "bold yellow"}
_STYLE = {
    CandidateCode.WINNER: "bold green",
    CandidateCode.CONTROL: "cyan",
    CandidateCode.UNDECIDED: "yellow",
}
_MOST = 25


def changes_text(changes: Mapping[str, Any]) -> str:
    """Return changed keys in short, such as ``"openvino threads=1"``."""
    words: list[str] = []
    for key, value in changes.items():
        name = key.removeprefix("execution.")
        if name == "engine":
            words.insert(0, str(value))
        elif name != "device":
            words.append(f"{name.rpartition('.')[2] if name.startswith('provider_options.') else name}={value}")
    return " ".join(words) or "the policy that was given"


def figure_text(objective: str, figure: float | None) -> str:
    """Return a figure of an objective with its unit."""
    if figure is None:
        return "-"
    if objective == "throughput":
        return f"{1 / figure:,.1f} rows/s"
    if objective == "memory":
        return f"{figure / 2**20:,.1f} MiB"
    if objective == "energy":
        return f"{figure:.4g} J"
    return f"{figure * 1e6:,.1f} us" if figure < 0.01 else f"{figure * 1e3:,.2f} ms"


def ranked(result: TuneResult) -> list[CandidateResult]:
    """Return the candidates, the winner first, then the control, then by figure; those without one at the end."""
    order = {CandidateCode.WINNER: 0, CandidateCode.CONTROL: 1}
    return sorted(
        result.candidates,
        key=lambda one: (order.get(one.code, 2), one.figure is None, one.figure or 0.0),
    )


def render(result: TuneResult) -> RenderableType:
    """Return headline, the policy that was found, and a table of candidates."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(result.headline, style=_HEAD[result.verdict]), Text(result.reason)]
    parts.append(Text(f"{result.model}: {result.question}, confidence {result.confidence:g}, {result.elapsed:.0f} s"))
    if result.changes:
        parts.append(Text("changed: " + ", ".join(f"{key}: {value}" for key, value in result.changes.items())))
    several = len(result.devices) > 1
    if several:
        parts.append(Text(f"devices: {', '.join(result.devices)}"))
    device = ("device",) if several else ()
    shown = table("candidates", ("id", "candidate", *device, result.objective, "gain", "memory", "error", "code"))
    rows = ranked(result)
    for one in rows[:_MOST]:
        shown.add_row(
            Text(one.id), Text(changes_text(one.changes)), *((Text(one.device),) if several else ()),
            figure_text(result.objective, one.figure),
            "-" if one.gain is None else f"{one.gain} of {one.gain.against}",
            "-" if one.memory is None else f"{one.memory / 2**20:.0f} MiB",
            "-" if one.error is None else f"{one.error:.2g}",
            Text(one.code, style=_STYLE.get(one.code, "")),
        )  # fmt: skip
    parts.append(shown)
    if len(rows) > _MOST:
        parts.append(Text(f"and {len(rows) - _MOST} more; the HTML page and the JSON have all, with their reasons"))
    parts += [
        Text(f"{one.id}: {one.reason}")
        for one in rows[:_MOST]
        if one.code not in (CandidateCode.CONTROL, CandidateCode.DUPLICATE)
    ]
    parts += [Text(f"note: {note}") for note in result.notes]
    return Group(*parts)
