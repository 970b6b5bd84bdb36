# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""HTML page of a search result, in the style of reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page.document import assemble
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table
from xpuruntime.policies import Policy
from xpuruntime.policies.quantities import share_text
from xpuruntime.tuning.result.text import changes_text, figure_text, ranked

if TYPE_CHECKING:
    from xpuruntime.tuning.result.tune_result import CandidateResult, TuneResult

__all__ = ["render_page"]

_PARTS = ("elements", "sorting", "tuned", "shell", "tuning")


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
        "known": [list(pair) for pair in known if pair[1]],
        "candidates": [_candidate(result, one) for one in ranked(result)],
        "policy": Policy.coerce(result.policy).dumps("yaml") if result.policy else "",
        "notes": list(result.notes),
    }


def _candidate(result: TuneResult, one: CandidateResult) -> dict[str, Any]:
    return {
        "id": one.id,
        "engine": one.engine or "-",
        "name": changes_text(one.changes),
        "keys": [
            *([key, str(value)] for key, value in one.changes.items()),
            *([["measured on", one.device]] if len(result.devices) > 1 and one.figure is not None else []),
            *([["CUDA graph", one.cuda_graph]] if one.cuda_graph not in (None, "off") else []),
        ],
        "code": one.code,
        "reason": one.reason,
        "ran": one.figure is not None,
        "front": one.id in result.front,
        "figure": one.figure,
        "figureText": figure_text(result.objective, one.figure),
        "gain": None if one.gain is None else one.gain.value,
        "gainText": "-" if one.gain is None else f"{one.gain} of {one.gain.against}",
        "memory": one.memory,
        "memoryText": "-" if one.memory is None else f"{one.memory / 2**20:.0f} MiB",
        "error": one.error,
        "errorText": "-" if one.error is None else f"{one.error:.2g}",
        "start": one.start,
        "startText": "-" if one.start is None else f"{one.start:.2f} s",
    }


def _fragment(result: TuneResult) -> str:
    """Return headline and candidates, for browsers without scripts."""
    kind = {0: "honoured", 1: "substituted"}.get(result.exit_code, "unobservable")
    rows = [
        (one.id, changes_text(one.changes), figure_text(result.objective, one.figure), Badge(one.code), one.reason)
        for one in ranked(result)
    ]
    head = f"<p class='xrt-headline xrt-{kind}'>{escaped(result.headline)}</p>"
    columns = ("id", "candidate", "figure", "code", "reason")
    return fragment([head, fragment_table("Candidates", columns, rows)])
