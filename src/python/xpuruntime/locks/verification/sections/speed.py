# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of speed: how much slower a session is than a control that is timed in the same rounds."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim
from xpuruntime.locks.verification.sections.controls import ControlError, open_pair
from xpuruntime.locks.verification.sections.expected import elsewhere, expected_ratio
from xpuruntime.locks.verification.timing import SMALLEST, time_metric
from xpuruntime.measuring.statistics import RatioVerdict, holm
from xpuruntime.policies import VerifySpeed
from xpuruntime.policies.quantities import share_text
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xpuruntime.lockfile.measured import LockedRatio
    from xpuruntime.locks.verification.sections.controls import Pair
    from xpuruntime.locks.verification.sections.subject import Subject
    from xpuruntime.locks.verification.timing import TimedMetric

__all__ = ["decide", "speed_claims"]

_QUIETER = "run on a quieter machine, or state a wider verify.speed.max_slowdown"
_MEASURED_AGAIN = (
    "`xrt lock MODEL --upgrade` on a quiet machine, with a longer verify.speed.budget, measures it again; "
    "or state a wider verify.speed.max_slowdown"
)
_WORKER_FIX = "install xpuruntime and the engine for that interpreter, or leave --against out"


def speed_claims(subject: Subject) -> Iterator[Claim]:
    """Time the session beside its control until every metric is decided or the budget is used up.

    With a lock, what is expected is the ratio to the control that the lock has. Where that is itself uncertain, only
    what is slower than its upper end is decided.
    """
    stated = subject.limits.speed
    if stated is None and subject.against is None:
        return
    checks = stated or VerifySpeed()
    ratios: dict[str, LockedRatio] = {}
    if subject.locked is not None and subject.against is None:
        for metric in checks.metric:
            found = elsewhere(subject, f"speed.{metric}", "speed") or expected_ratio(subject, metric, checks)
            if isinstance(found, Claim):
                yield subject.placed(found, "verify.speed")
            else:
                ratios[metric] = found
        if not ratios:
            return
        checks = checks.replace(metric=tuple(ratios))
    ends = time.monotonic() + (checks.budget if subject.budget is None else subject.budget)
    with ExitStack() as stack:
        try:
            pair = open_pair(subject, stack)
            findings = [_found(one, pair, checks, ends - time.monotonic(), ratios.get(one)) for one in checks.metric]
        except (ControlError, WorkerFailure) as error:
            for metric in checks.metric:
                claim = _unmeasured(metric, error.reason, checks, "the control")
                claim = msgspec.structs.replace(claim, code=ClaimCode.NO_CONTROL, fix=error.fix)
                if isinstance(error, WorkerFailure):  # nothing was measured, which is a fault and no doubt
                    claim = msgspec.structs.replace(
                        claim, verdict="fail", code=ClaimCode.WORKER_FAILED, reason=str(error), fix=_WORKER_FIX
                    )
                yield subject.placed(claim, "verify.speed")
            return
    for claim in decide(findings, checks, pair.what, subject.lock or ""):
        yield subject.placed(claim, "verify.speed.max_slowdown")


def _found(metric: str, pair: Pair, checks: VerifySpeed, left: float, locked: LockedRatio | None) -> TimedMetric:
    if locked is None:
        return time_metric(metric, pair.session, pair.control, checks, left)
    found = time_metric(metric, pair.session, pair.control, checks, left, expected=locked.high)
    return found._replace(locked=locked, figures={**found.figures, "locked_ratio": locked.ratio})


def decide(findings: Sequence[TimedMetric], checks: VerifySpeed, control: str, lock: str = "") -> list[Claim]:
    """Return the claims. All of them are decided together, by the method of Holm."""
    known = {one.metric: one.comparison for one in findings if one.comparison is not None}
    slower = holm([one.p_slower for one in known.values()], confidence=checks.confidence)
    within = holm([one.p_within_limit for one in known.values()], confidence=checks.confidence)
    flags = dict(zip(known, zip(slower, within, strict=True), strict=True))
    return [_claim(one, flags.get(one.metric, (False, False)), checks, control, lock) for one in findings]


def _unmeasured(metric: str, reason: str, checks: VerifySpeed, control: str) -> Claim:
    return Claim(
        id=f"speed.{metric}",
        section="speed",
        requested=f"at most {share_text(checks.max_slowdown)} slower than {control}",
        observed="not measured",
        verdict="inconclusive",
        code=ClaimCode.UNDECIDED,
        reason=reason,
        inconclusive=checks.inconclusive,
    )


def _claim(found: TimedMetric, flags: tuple[bool, bool], checks: VerifySpeed, control: str, lock: str) -> Claim:
    locked = found.locked
    if locked is not None:
        control = f"{locked.ratio:.3f} [{locked.low:.3f}, {locked.high:.3f}] of {control}, as locked"
    claim = _unmeasured(found.metric, found.reason, checks, control)
    one = found.comparison
    if one is None:
        return msgspec.structs.replace(claim, figures=found.figures)
    figures = {**found.figures, "ratio": one.ratio, "low": one.low, "high": one.high, "rounds": float(one.rounds)}
    scale = 1.0 if locked is None else locked.high
    observed = f"{one.ratio * scale:.3f} [{one.low * scale:.3f}, {one.high * scale:.3f}] of the control"
    claim = msgspec.structs.replace(claim, observed=observed, figures={**figures, "margin": one.margin})
    if one.margin > checks.max_slowdown:
        smallest = f"or {SMALLEST * 1e6:g} us, which are {share_text(one.margin)} here, slower"
        claim = msgspec.structs.replace(claim, requested=claim.requested.replace("slower", smallest, 1))
    limit, remarks = 1 + one.margin, "".join(f"; {remark}" for remark in found.remarks)
    if one.too_noisy and one.verdict is not RatioVerdict.SLOWER and not one.within_limit:
        split = one.control_split
        apart = "" if split is None else f", {split.ratio:.3f} [{split.low:.3f}, {split.high:.3f}]"
        reason = f"the control differs from itself by more than half of the margin{apart}{remarks}"
        return msgspec.structs.replace(claim, code=ClaimCode.NOISY, reason=reason, fix=_QUIETER)
    if found.busy:
        reason = f"the medians and the fastest calls lie on different sides of {limit:.3f}: {found.busy}{remarks}"
        return msgspec.structs.replace(claim, code=ClaimCode.NOISY, reason=reason, fix=_QUIETER)
    if flags[0] and one.low > limit:
        reason = f"slower by {share_text(one.ratio - 1)}, where {share_text(one.margin)} are allowed{remarks}"
        fix = "find what changed with two reports: `xrt explain before.json after.json`"
        if locked is not None:
            fix = f"find what changed: `xrt diff {lock} here MODEL`"
        return msgspec.structs.replace(claim, verdict="fail", code=ClaimCode.SLOWER, reason=reason, fix=fix)
    if locked is not None and (doubt := locked.doubt(found.metric, one.margin)):
        return msgspec.structs.replace(claim, code=ClaimCode.NOISY, reason=doubt, fix=_MEASURED_AGAIN)
    if flags[1] and one.high < limit:
        what = "the control" if locked is None else "what was locked"
        reason = f"within {share_text(one.margin)} of {what} at a confidence of {checks.confidence:g}{remarks}"
        return msgspec.structs.replace(claim, verdict="pass", code=ClaimCode.OK, reason=reason)
    reason = f"after {one.rounds} rounds ({found.ended}) the interval still holds the limit {limit:.3f}{remarks}"
    fix = "state a longer verify.speed.budget, or run on a quieter machine"
    return msgspec.structs.replace(claim, reason=reason, fix=fix)
