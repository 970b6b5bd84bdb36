# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search results as text, tables and an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page.document import assemble
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table
from xpuruntime.policies import Policy
from xpuruntime.policies.kinds import share_text
from xpuruntime.printable import bytes_text
from xpuruntime.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from rich.console import RenderableType

    from xpuruntime.tuning.tune_result import CandidateResult, TuneResult

__all__ = [
    "changes_text",
    "figure_text",
    "ranked",
    "render",
    "render_page",
]

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
        return bytes_text(round(figure))
    if objective == "energy":
        return f"{figure:.4g} J"
    return f"{figure * 1e6:,.1f} us" if figure < 0.01 else f"{figure * 1e3:,.2f} ms"


def ranked(result: TuneResult) -> list[CandidateResult]:
    """Return the candidates, the winner first, then the control, then by figure; those without one at the end."""
    order = {CandidateCode.WINNER: 0, CandidateCode.CONTROL: 1}
    return sorted(
        result.candidates,
        key=lambda candidate: (order.get(candidate.code, 2), candidate.figure is None, candidate.figure or 0.0),
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
    for row in rows[:_MOST]:
        shown.add_row(
            Text(row.id), Text(changes_text(row.changes)), *((Text(row.device),) if several else ()),
            figure_text(result.objective, row.figure),
            "-" if row.gain is None else f"{row.gain} of {row.gain.against}",
            "-" if row.memory is None else bytes_text(row.memory),
            "-" if row.error is None else f"{row.error:.2g}",
            Text(row.code, style=_STYLE.get(row.code, "")),
        )  # fmt: skip
    parts.append(shown)
    if len(rows) > _MOST:
        parts.append(Text(f"and {len(rows) - _MOST} more; the HTML page and the JSON have all, with their reasons"))
    parts += [
        Text(f"{row.id}: {row.reason}")
        for row in rows[:_MOST]
        if row.code not in (CandidateCode.CONTROL, CandidateCode.DUPLICATE)
    ]
    parts += [Text(f"note: {note}") for note in result.notes]
    return Group(*parts)


_PARTS = ("elements", "sorting", "intervals", "tuned", "shell", "tuning")


def render_page(result: TuneResult) -> str:
    """Return the page. It loads nothing, from nowhere, and shows all text of the result as text."""
    name = result.model.replace("\\", "/").rpartition("/")[2]
    return assemble("tuning.html", "search", _PARTS, f"{result.headline} - {name}", _data(result), _fragment(result))


def _data(result: TuneResult) -> dict[str, Any]:
    known = [
        ("model", result.model),
        ("objective", result.question),
        ("inputs", result.inputs),
        ("devices", ", ".join(result.devices)),
        ("decided", f"at a confidence of {result.confidence:g}, gains from {share_text(result.min_effect)}"),
        ("took", f"{result.elapsed:.0f} s of {result.budget:.0f} s"),
        ("created", result.created),
        ("version", result.version),
        ("exit code", str(result.exit_code)),
        *((stage, str(count)) for stage, count in result.stages.items()),
    ]
    return {
        "headline": result.headline,
        "reason": result.reason,
        "exit": result.exit_code,
        "objective": result.objective,
        "least": 1 + result.min_effect,
        "known": [list(pair) for pair in known if pair[1]],
        "candidates": [_candidate(result, candidate) for candidate in ranked(result)],
        "policy": Policy.coerce(result.policy).dumps("yaml") if result.policy else "",
        "notes": list(result.notes),
    }


def _candidate(result: TuneResult, candidate: CandidateResult) -> dict[str, Any]:
    return {
        "id": candidate.id,
        "engine": candidate.engine or "-",
        "name": changes_text(candidate.changes),
        "keys": [
            *([key, str(value)] for key, value in candidate.changes.items()),
            *([["measured on", candidate.device]] if len(result.devices) > 1 and candidate.figure is not None else []),
            *([["CUDA graph", candidate.cuda_graph]] if candidate.cuda_graph not in (None, "off") else []),
        ],
        "code": candidate.code,
        "reason": candidate.reason,
        "ran": candidate.figure is not None,
        "front": candidate.id in result.front,
        "figure": candidate.figure,
        "figureText": figure_text(result.objective, candidate.figure),
        "gain": None if candidate.gain is None else candidate.gain.value,
        "interval": None
        if candidate.gain is None
        else {name: getattr(candidate.gain, name) for name in ("value", "low", "high", "against")},
        "gainText": "-" if candidate.gain is None else f"{candidate.gain} of {candidate.gain.against}",
        "memory": candidate.memory,
        "memoryText": "-" if candidate.memory is None else bytes_text(candidate.memory),
        "error": candidate.error,
        "errorText": "-" if candidate.error is None else f"{candidate.error:.2g}",
        "start": candidate.start,
        "startText": "-" if candidate.start is None else f"{candidate.start:.2f} s",
    }


def _fragment(result: TuneResult) -> str:
    """Return headline and candidates, for browsers without scripts."""
    kind = {0: "honoured", 1: "substituted"}.get(result.exit_code, "unobservable")
    rows = [
        (
            candidate.id,
            changes_text(candidate.changes),
            figure_text(result.objective, candidate.figure),
            Badge(candidate.code),
            candidate.reason,
        )
        for candidate in ranked(result)
    ]
    head = f"<p class='xrt-headline xrt-{kind}'>{escaped(result.headline)}</p>"
    columns = ("id", "candidate", "figure", "code", "reason")
    return fragment([head, fragment_table("Candidates", columns, rows)])
