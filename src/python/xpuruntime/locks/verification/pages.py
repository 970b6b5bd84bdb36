# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification for people: Markdown and an HTML page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page.document import assemble
from xpuruntime.locks.verification.claims import SECTIONS, place_text, worst_first
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.locks.verification.claims import Claim
    from xpuruntime.locks.verification.result import VerificationResult

__all__ = ["render_page", "to_markdown"]

_MARK = {"pass": "✅", "fail": "❌", "inconclusive": "⚠️", "unobservable": "❔", "skipped": "⏭️"}
_SPECIAL = re.compile(r"[\\`*_\[\]#|~<>@&]")


def to_markdown(result: VerificationResult) -> str:
    """Return Markdown in which all text of the result is text: no markup, link or mention is made of it."""
    lines = [f"## {_plain(result.headline)}", ""]
    where = f" on {_plain(f'{result.engine}@{result.device}')}" if result.engine else ""
    lines += [f"{_code(result.model)}{where}", ""]
    claims = worst_first(result.claims)
    if claims:
        lines += ["| claim | requested | observed | verdict |", "|---|---|---|---|"]
        lines += [_row(claim) for claim in claims]
        lines.append("")
    reasons = [claim for claim in claims if claim.verdict != "pass"]
    if reasons:
        lines += ["### Reasons", ""]
        for reason in reasons:
            place = place_text(result, reason)
            lines.append(f"* {_code(reason.id)}: {_plain(reason.reason)}" + (f" ({_code(place)})" if place else ""))
            if reason.fix:
                lines.append(f"  Fix: {_plain(reason.fix)}")
        lines.append("")
    if result.notes:
        lines += ["### Notes", "", *(f"* {_plain(note)}" for note in result.notes), ""]
    return "\n".join(lines)


def _row(claim: Claim) -> str:
    verdict = f"{_MARK[claim.verdict]} {claim.verdict}"
    return f"| {_code(claim.id)} | {_plain(claim.requested)} | {_plain(claim.observed)} | {verdict} |"


def _plain(text: str) -> str:
    """Return text on one line, with what Markdown or HTML would read as markup as entities."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", printable(" ".join(text.split())))


def _code(text: str) -> str:
    """Return text as code; pipes, which would end a cell of a table, as entities in plain text."""
    line = printable(" ".join(text.split()))
    return _plain(line) if "|" in line or "`" in line or not line else f"`{line}`"


_PARTS = ("elements", "sorting", "intervals", "verified", "shell", "verification")


def render_page(result: VerificationResult) -> str:
    """Return the page. It loads nothing, from nowhere, and shows all text of the result as text."""
    name = result.model.replace("\\", "/").rpartition("/")[2]
    return assemble(
        "verification.html",
        "verification",
        _PARTS,
        f"{result.headline} - {name}",
        _data(result),
        _fragment(result),
    )


def _data(result: VerificationResult) -> dict[str, Any]:
    names = ("model", "policy", "lock", "engine", "device", "created", "version")
    return {
        "headline": result.headline,
        "verdict": result.verdict,
        "exit": result.exit_code,
        "known": [[name, value] for name in names if (value := getattr(result, name))],
        "claims": [_claim(result, one) for one in worst_first(result.claims)],
        "sections": [section for section in SECTIONS if any(claim.section == section for claim in result.claims)],
        "facts": [list(pair) for pair in result.facts.items()],
        "notes": list(result.notes),
    }


def _claim(result: VerificationResult, claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.id,
        "section": claim.section,
        "requested": claim.requested,
        "observed": claim.observed,
        "verdict": claim.verdict,
        "rule": "" if claim.verdict == "pass" else claim.code.rule,
        "reason": claim.reason,
        "fix": claim.fix or "",
        "place": place_text(result, claim),
        "figures": [[name, f"{value:.6g}"] for name, value in claim.figures.items()],
        "interval": _interval(claim),
    }


def _interval(claim: Claim) -> dict[str, float | None] | None:
    """Return a figure of speed, start or memory and its limit, as ratios to what it is compared with."""
    known = claim.figures
    if "margin" in known:
        return {"value": known["ratio"], "low": known["low"], "high": known["high"], "limit": 1 + known["margin"]}
    if "locked_ratio" in known and "ratio" in known:
        value, low, high = (known[name] / known["locked_ratio"] for name in ("ratio", "low", "high"))
        return {"value": value, "low": low, "high": high, "limit": None}
    for figure, limit, locked in (("peak_bytes", "limit_bytes", "locked_bytes"), ("seconds", "limit_seconds", "")):
        if figure in known and limit in known:
            base = known.get(locked, known[limit])
            return {"value": known[figure] / base, "limit": known[limit] / base}
    if known.get("before_bytes"):
        return {"value": known["after_bytes"] / known["before_bytes"]}
    return None


def _fragment(result: VerificationResult) -> str:
    """Return headline and claims, for browsers without scripts."""
    kind = {"pass": "honoured", "fail": "substituted"}.get(result.verdict, "unobservable")
    rows = [(one.id, one.requested, one.observed, Badge(one.verdict), one.reason) for one in worst_first(result.claims)]
    head = f"<p class='xrt-headline xrt-{kind}'>{escaped(result.headline)}</p>"
    columns = ("claim", "requested", "observed", "verdict", "reason")
    return fragment([head, fragment_table("Claims", columns, rows)])
