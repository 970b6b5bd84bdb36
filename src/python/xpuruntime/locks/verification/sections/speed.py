# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of speed: how much slower a session is than a control that is timed in the same rounds."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from xpuruntime.errors import InputError
from xpuruntime.locks.verification.claims import Claim
from xpuruntime.locks.verification.sections.controls import ControlError, open_pair
from xpuruntime.measuring.rounds import measure
from xpuruntime.measuring.statistics import Margin, Verdict, compare, holm, require_runs, runs_required
from xpuruntime.measuring.worker import WorkerFailure
from xpuruntime.policies import VerifySpeed
from xpuruntime.policies.quantities import share_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xpuruntime.locks.verification.sections.controls import Pair
    from xpuruntime.locks.verification.sections.subject import Subject
    from xpuruntime.measuring.rounds import Measured, Sampler
    from xpuruntime.measuring.statistics import Comparison

__all__ = ["decide", "speed_claims"]

#: Rounds of medians, the fewest and the most; and rounds of percentiles, which are looked at once.
_ROUNDS, _TAIL_ROUNDS = (9, 121), 15
#: Runs of a turn from which a 99th percentile is taken, and seconds of a sample below which `measure` joins calls.
_TAIL_RUNS, _SAMPLE = 100, 20e-6
_SMALLEST = 2e-6
_WORKER_FIX = "install xpuruntime and the engine for that interpreter, or leave --against out"


class Finding(NamedTuple):
    """One metric: how it compares with the control, or why it does not."""

    metric: str
    comparison: Comparison | None
    figures: dict[str, float]
    remarks: Sequence[str]
    reason: str = ""
    ended: str = ""


def speed_claims(subject: Subject) -> Iterator[Claim]:
    """Time the session beside its control until every metric is decided or the budget is used up."""
    stated = subject.limits.speed
    if stated is None and subject.against is None:
        return
    checks = stated or VerifySpeed()
    ends = time.monotonic() + (checks.budget if subject.budget is None else subject.budget)
    with ExitStack() as stack:
        try:
            pair = open_pair(subject, stack)
            findings = [_find(metric, pair, checks, ends - time.monotonic()) for metric in checks.metric]
        except (ControlError, WorkerFailure) as error:
            for metric in checks.metric:
                worker = isinstance(error, WorkerFailure)
                code, fix = ("worker_failed", _WORKER_FIX) if worker else ("no_control", None)
                claim = msgspec.structs.replace(
                    _unmeasured(metric, str(error), checks, "the control"), code=code, fix=fix
                )
                yield subject.placed(claim, "verify.speed")
            return
    for claim in decide(findings, checks, pair.what):
        yield subject.placed(claim, "verify.speed.max_slowdown")


def _find(metric: str, pair: Pair, checks: VerifySpeed, left: float) -> Finding:
    family = len(checks.metric)
    margin = Margin(checks.max_slowdown, _SMALLEST)
    variants = {"control": pair.control, "session": pair.session}
    budget = max(left, 1.0)
    if metric == "latency.p50":
        found = measure(
            variants,
            control="control",
            margin=margin,
            confidence=checks.confidence,
            rounds=_ROUNDS,
            budget=budget,
            settled=_settled,
            family=family,
        )
        figures = {
            "session_us": float(np.median(found.rounds["session"])) * 1e6,
            "control_us": float(np.median(found.rounds["control"])) * 1e6,
        }
        return Finding(metric, found.comparisons["session"], figures, found.conditions.remarks(), ended=found.ended)
    return _tail(metric, variants, checks, margin, budget)


def _settled(comparisons: Mapping[str, Comparison]) -> bool:
    return all(one.within_limit or one.verdict is Verdict.SLOWER for one in comparisons.values())


def _tail(metric: str, variants: Mapping[str, Sampler], checks: VerifySpeed, margin: Margin, budget: float) -> Finding:
    """Compare 99th percentiles of turns of single runs."""
    least = runs_required(0.99)
    singles = {name: _single(sampler) for name, sampler in variants.items()}
    once = max(float(np.median(pair(1, 5))) for pair in singles.values())
    most = _TAIL_ROUNDS * 3 * _TAIL_RUNS * once
    if most > budget:
        reason = (
            f"p99 takes {least} runs of each side at least, and {_TAIL_ROUNDS} turns of {_TAIL_RUNS} runs would take "
            f"{most:.0f} s of the {budget:.0f} s that are left: state a longer verify.speed.budget, or latency.p50"
        )
        return Finding(metric, None, {}, (), reason)
    found = measure(
        singles,
        control="control",
        margin=margin,
        confidence=checks.confidence,
        rounds=(_TAIL_ROUNDS, _TAIL_ROUNDS),
        budget=budget,
        block=_TAIL_RUNS * max(once, _SAMPLE),
        settled=lambda _: False,
    )
    times, control, twin = _percentiles(found)
    runs = len(found.calls["session"])
    try:
        require_runs(0.99, runs, confidence=checks.confidence)
    except InputError as error:
        return Finding(metric, None, {"runs": float(runs)}, found.conditions.remarks(), str(error))
    family = len(checks.metric)
    comparison = compare(times, control, twin=twin, margin=margin, confidence=checks.confidence, family=family)
    figures = {
        "session_us": float(np.median(times)) * 1e6,
        "control_us": float(np.median(control)) * 1e6,
        "runs": float(runs),
    }
    return Finding(metric, comparison, figures, found.conditions.remarks(), ended=found.ended)


def _single(sampler: Sampler) -> Sampler:
    """Return a variant whose samples are single runs, whatever number of calls a sample is asked to have."""
    return lambda calls, samples: [one * calls for one in sampler(1, samples)]


def _percentiles(found: Measured) -> tuple[list[float], list[float], list[float]]:
    """Return the 99th percentile of each turn of the session, and of the control's two turns of each round."""
    rounds = len(found.twin)
    session = np.asarray(found.calls["session"]).reshape(rounds, -1)
    control = np.asarray(found.calls["control"]).reshape(rounds, 2, -1)
    both = np.percentile(control, 99, axis=2)
    return np.percentile(session, 99, axis=1).tolist(), both[:, 0].tolist(), both[:, 1].tolist()


def decide(findings: Sequence[Finding], checks: VerifySpeed, control: str) -> list[Claim]:
    """Return the claims. All of them are decided together, by the method of Holm."""
    known = {one.metric: one.comparison for one in findings if one.comparison is not None}
    slower = holm([one.p_slower for one in known.values()], confidence=checks.confidence)
    within = holm([one.p_within_limit for one in known.values()], confidence=checks.confidence)
    flags = dict(zip(known, zip(slower, within, strict=True), strict=True))
    return [_claim(one, flags.get(one.metric, (False, False)), checks, control) for one in findings]


def _unmeasured(metric: str, reason: str, checks: VerifySpeed, control: str) -> Claim:
    return Claim(
        id=f"speed.{metric}",
        section="speed",
        requested=f"at most {share_text(checks.max_slowdown)} slower than {control}",
        observed="not measured",
        verdict="inconclusive",
        code="undecided",
        reason=reason,
        inconclusive=checks.inconclusive,
    )


def _claim(found: Finding, flags: tuple[bool, bool], checks: VerifySpeed, control: str) -> Claim:
    claim = _unmeasured(found.metric, found.reason, checks, control)
    one = found.comparison
    if one is None:
        return msgspec.structs.replace(claim, figures=found.figures)
    figures = {**found.figures, "ratio": one.ratio, "low": one.low, "high": one.high, "rounds": float(one.rounds)}
    observed = f"{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}] of the control"
    claim = msgspec.structs.replace(claim, observed=observed, figures={**figures, "margin": one.margin})
    limit, remarks = 1 + one.margin, "".join(f"; {remark}" for remark in found.remarks)
    if one.too_noisy:
        split = one.control_split
        apart = "" if split is None else f", {split.ratio:.3f} [{split.low:.3f}, {split.high:.3f}]"
        reason = f"the control differs from itself by more than half of the margin{apart}{remarks}"
        fix = "run on a quieter machine, or state a wider verify.speed.max_slowdown"
        return msgspec.structs.replace(claim, code="noisy", reason=reason, fix=fix)
    if flags[0] and one.low > limit:
        reason = f"slower by {share_text(one.ratio - 1)}, where {share_text(one.margin)} are allowed{remarks}"
        fix = "find what changed with two reports: `xrt explain before.json after.json`"
        return msgspec.structs.replace(claim, verdict="fail", code="slower", reason=reason, fix=fix)
    if flags[1] and one.high < limit:
        reason = f"within {share_text(one.margin)} of the control at a confidence of {checks.confidence:g}{remarks}"
        return msgspec.structs.replace(claim, verdict="pass", code="ok", reason=reason)
    reason = f"after {one.rounds} rounds ({found.ended}) the interval still holds the limit {limit:.3f}{remarks}"
    fix = "state a longer verify.speed.budget, or run on a quieter machine"
    return msgspec.structs.replace(claim, reason=reason, fix=fix)
