# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of a verification. Every colour stands beside a word that says the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import table
from xpuruntime.locks.verification.vocabulary import VERDICTS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.locks.verification.claims import Claim, VerificationResult

__all__ = ["place_text", "render", "worst_first"]

_STYLE = {"pass": "green", "fail": "bold red", "inconclusive": "bold yellow", "unobservable": "yellow", "skipped": ""}
_HEAD = {"pass": "bold green", "warn": "bold yellow", "fail": "bold red", "inconclusive": "bold yellow"}
_WIDTHS = {"claim": 24, "verdict": 12}


def worst_first(claims: tuple[Claim, ...]) -> list[Claim]:
    """Return claims by verdict, the worst first, otherwise in their order."""
    return sorted(claims, key=lambda one: VERDICTS.index(one.verdict))


def place_text(result: VerificationResult, claim: Claim) -> str:
    """Return where the policy states a claim, such as ``"policy.yaml:7:3"``; empty where no file does."""
    return f"{result.policy}:{claim.line}:{claim.column}" if result.policy and claim.line else ""


def render(result: VerificationResult) -> RenderableType:
    """Return headline, a table of all claims, and the reasons of those that did not pass."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(result.headline, style=_HEAD[result.verdict])]
    where = f"{result.model} on {result.engine}@{result.device}" if result.engine else result.model
    parts.append(Text(where + (f", lock {result.lock}" if result.lock else "")))
    claims = worst_first(result.claims)
    if claims:
        shown = table("claims", ("claim", "requested", "observed", "verdict"), widths=_WIDTHS)
        for one in claims:
            shown.add_row(
                Text(one.id), Text(one.requested), Text(one.observed), Text(one.verdict, style=_STYLE[one.verdict])
            )
        parts.append(shown)
    for one in claims:
        if one.verdict == "pass":
            continue
        place = place_text(result, one)
        parts.append(Text(f"{one.verdict}: {one.id}: {one.reason}{f' ({place})' if place else ''}"))
        if one.fix:
            parts.append(Text(f"  fix: {one.fix}"))
    parts += [Text(f"note: {note}") for note in result.notes]
    return Group(*parts)
