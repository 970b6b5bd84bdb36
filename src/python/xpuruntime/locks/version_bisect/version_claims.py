# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`VersionClaim`: what must be the same with a version as with the good one, and whether a difference says so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from xpuruntime.errors import InputError
from xpuruntime.measuring.statistics import RatioVerdict

if TYPE_CHECKING:
    from xpuruntime.locks.diff.result import Diff
    from xpuruntime.locks.version_bisect.search import Judgement

__all__ = ["FORMS", "VersionClaim", "judge", "read_claim"]

#: How a claim is written, for messages and help.
FORMS = (
    "runs", "plan", "placement", "kernels", "numerics", "accuracy <= 1e-3", "unit:NODE.kernel",
    "speed.latency.p50 <= +5%",
)  # fmt: skip
_LEVELS = ("plan", "placement", "kernels", "numerics")
#: What of a unit can be claimed, to how rows of a difference name it.
_ASPECTS = {
    "kernel": ("kernel", "xpuruntime kernel"),
    "precision": ("precision",),
    "layout": ("layout",),
    "placement": ("placement",),
    "fusion": ("grouping", "folding"),
}
_LIMIT = re.compile(r"(?P<what>accuracy|speed\.latency\.p50)\s*(?:<=\s*(?P<value>\+?[0-9.eE+-]+)\s*(?P<percent>%)?)?\Z")
_UNIT = re.compile(r"unit:(?P<node>.+)\.(?P<aspect>[a-z]+)\Z", re.DOTALL)
_ACCURACY, _SLOWDOWN = 1e-3, 0.05


class VersionClaim(NamedTuple):
    """One claim about a model that is compared between two environments."""

    text: str
    kind: Literal["runs", "plan", "placement", "kernels", "numerics", "accuracy", "unit", "speed"]
    limit: float = 0.0
    node: str = ""
    aspect: str = ""


def read_claim(text: str) -> VersionClaim:
    """Read a claim."""
    said = text.strip()
    if said == "runs" or said in _LEVELS:
        return VersionClaim(said, said)  # type: ignore[arg-type]
    if found := _UNIT.match(said):
        if found["aspect"] not in _ASPECTS:
            raise InputError(f"claim {text!r}: of a unit {', '.join(_ASPECTS)} can be claimed, not {found['aspect']!r}")
        return VersionClaim(said, "unit", node=found["node"], aspect=found["aspect"])
    if found := _LIMIT.match(said):
        speed = found["what"] != "accuracy"
        limit = _number(found["value"], _SLOWDOWN if speed else _ACCURACY) / (100 if found["percent"] else 1)
        if 0 <= limit < float("inf"):
            return VersionClaim(said, "speed" if speed else "accuracy", limit=limit)
    raise InputError(f"claim {text!r} cannot be bisected. Fix: give one of {'; '.join(FORMS)}")


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        return float("nan")


def judge(claim: VersionClaim, diff: Diff) -> tuple[Judgement, str]:
    """Return whether a claim holds in the second environment as in the first, and why."""
    if claim.kind == "runs":
        return "good", "the model runs"
    if claim.kind == "speed":
        return _judge_speed(diff)
    if claim.kind == "accuracy":
        return _judge_accuracy(claim, diff)
    if claim.kind == "unit":
        levels = ("placement", "kernels")
        rows = [
            row
            for name in levels
            for row in diff.level(name).rows
            if row.what in _ASPECTS[claim.aspect] and claim.node in row.nodes
        ]
        if rows:
            return "bad", f"{claim.aspect} of {claim.node}: {rows[0].before} -> {rows[0].after}"
        if claim.aspect == "kernel" and diff.level("kernels").verdict == "unobservable":
            return "skipped", f"unobservable: {diff.level('kernels').reason}"
        return "good", f"{claim.aspect} of {claim.node} is the same"
    level = diff.level(claim.kind)
    if level.verdict == "same":
        return "good", level.reason or f"{claim.kind}: same"
    if level.verdict != "differs":
        return "skipped", f"{level.verdict}: {level.reason}"
    first, more = level.rows[0], len(level.rows) - 1
    if first.figures:
        return "bad", f"{first.id}: {first.what}"
    subject = f"{first.what}: {', '.join(first.nodes[:2]) or first.id}" if first.what else first.id
    return "bad", f"{subject}: {first.before} -> {first.after}" + (f" and {more} more" if more else "")


def _judge_speed(diff: Diff) -> tuple[Judgement, str]:
    found = diff.speed
    if found is None:
        return "skipped", diff.level("time").reason
    said = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] of the good version's time"
    if found.verdict is RatioVerdict.SLOWER:
        return "bad", said
    if found.within_limit:
        return "good", said
    return "skipped", f"undecided: {said}" + ("; the machine is too noisy" if found.too_noisy else "")


def _judge_accuracy(claim: VersionClaim, diff: Diff) -> tuple[Judgement, str]:
    level = diff.level("numerics")
    if level.verdict == "same":
        return "good", level.reason
    if level.verdict != "differs":
        return "skipped", f"{level.verdict}: {level.reason}"
    worst, said = 0.0, ""
    for row in level.rows:
        if not row.id.startswith("output "):
            continue
        drift = row.figures.get("max_rel")
        if drift is None or not drift <= claim.limit:
            return "bad", f"{row.id}: {row.what or f'{row.before} -> {row.after}'}"
        if drift >= worst:
            worst, said = drift, f"{row.id}: drift {drift:.2g} of the largest value"
    return "good", said
