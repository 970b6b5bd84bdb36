# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as one HTML page, in the style of reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page.document import assemble
from xpuruntime.locks.verification.text import place_text, worst_first
from xpuruntime.locks.verification.vocabulary import SECTIONS
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table

if TYPE_CHECKING:
    from xpuruntime.locks.verification.claims import Claim, VerificationResult

__all__ = ["render_page"]

_PARTS = ("elements", "sorting", "verified", "shell", "verification")


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
        "sections": [section for section in SECTIONS if any(one.section == section for one in result.claims)],
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
    }


def _fragment(result: VerificationResult) -> str:
    """Return headline and claims, for browsers without scripts."""
    kind = {"pass": "honoured", "fail": "substituted"}.get(result.verdict, "unobservable")
    rows = [(one.id, one.requested, one.observed, Badge(one.verdict), one.reason) for one in worst_first(result.claims)]
    head = f"<p class='xrt-headline xrt-{kind}'>{escaped(result.headline)}</p>"
    columns = ("claim", "requested", "observed", "verdict", "reason")
    return fragment([head, fragment_table("Claims", columns, rows)])
