# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as Markdown, as code hosts show it: a headline, a table of claims, reasons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xpuruntime.locks.verification.text import place_text, worst_first
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.locks.verification.claims import Claim, VerificationResult

__all__ = ["to_markdown"]

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
        lines += [_row(one) for one in claims]
        lines.append("")
    reasons = [one for one in claims if one.verdict != "pass"]
    if reasons:
        lines += ["### Reasons", ""]
        for one in reasons:
            place = place_text(result, one)
            lines.append(f"* {_code(one.id)}: {_plain(one.reason)}" + (f" ({_code(place)})" if place else ""))
            if one.fix:
                lines.append(f"  Fix: {_plain(one.fix)}")
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
