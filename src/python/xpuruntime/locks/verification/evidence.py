# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of evidence: policy keys, what was observed, what differs from a lock; and those of audits of timed runs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.key_observations import computing
from xpuruntime.evidence.tolerances import RANDOM_FIX, compare_within
from xpuruntime.inference.comparing import tolerance_of
from xpuruntime.lockfile.drift import DriftCode, accept_command, shown
from xpuruntime.locks.relock import lock
from xpuruntime.locks.verification.claims import MACHINE, Claim, ClaimCode, ClaimVerdict, Subject
from xpuruntime.measuring.statistics import Margin, RatioComparison, RatioVerdict, compare
from xpuruntime.policies.call_facts import Glob
from xpuruntime.policies.kinds import share_text

if TYPE_CHECKING:
    import os

    from xpuruntime.evidence import Report
    from xpuruntime.evidence.difference import Difference
    from xpuruntime.evidence.records import Observation, Unit

#: Pairs of new and repeated inputs after which the times are compared, seconds for them, and what counts: less than ten
#: microseconds come from the caches and branch predictors of processors, too.
_PAIRS, _CACHE_SECONDS = (40, 80, 160, 320), 6.0
_FASTER = Margin(0.10, 10e-6)
#: Timed runs, as far as they take no longer than this, and how many of their outputs are kept.
_AUDITED_RUNS, _SECONDS, _KEPT = 200, 1.0, 8


def audit_claims(subject: Subject) -> Iterator[Claim]:
    """Yield ``audit.same_work`` and ``audit.no_cache``.

    The first compares outputs of runs in a timed loop with a run outside of it, the second times inputs that were run
    before beside the same inputs when they were new.
    """
    yield _same_work(subject)
    yield _no_cache(subject)


def _same_work(subject: Subject) -> Claim:
    session, feeds = subject.session, subject.feeds
    expected = session.run(feeds)
    kept, runs = _timed_outputs(subject)
    limits = tolerance_of(session)
    wrong = []
    for number, outputs in kept.items():
        comparison = compare_within(expected, outputs, limits, session.model.random_outputs)
        if not comparison.passed:
            wrong.append(f"run {number}: {comparison.figures}")
    claim = Claim(
        id="audit.same_work",
        section="audit",
        requested="timed runs give the outputs of untimed runs",
        observed=f"{len(kept) - len(wrong)} of {len(kept)} sampled runs agree",
        verdict="fail" if wrong else "pass",
        code=ClaimCode.OTHER_WORK if wrong else ClaimCode.OK,
        reason="; ".join(wrong[:3]) if wrong else f"{len(kept)} of {runs} timed runs were compared",
        fix="compare the outputs of single runs with `xrt compare`" if wrong else None,
        figures={"runs": runs, "sampled": len(kept), "different": len(wrong)},
    )
    drawn = session.model.random_outputs
    if wrong or not drawn:
        return claim
    said = ", ".join(f"{name!r} has random numbers of node {node}" for name, node in drawn.items())
    if len(drawn) < len(expected):
        return msgspec.structs.replace(claim, reason=f"{claim.reason}, but {said}")
    return msgspec.structs.replace(
        claim, observed="not compared", verdict="inconclusive", code=ClaimCode.NOT_COMPARED, reason=said, fix=RANDOM_FIX
    )


def _timed_outputs(subject: Subject) -> tuple[dict[int, dict[str, Any]], int]:
    """Return the outputs of some runs of a timed loop, drawn with a fixed seed, and how many runs there were."""
    run, feeds = subject.session.run, subject.feeds
    draw, kept = random.Random(0), {}
    chosen = set(draw.sample(range(_AUDITED_RUNS), _KEPT))
    start = last = time.perf_counter()
    done = 0
    while done < _AUDITED_RUNS and (last - start < _SECONDS or done < _KEPT):
        outputs = run(feeds)
        last = time.perf_counter()
        if done in chosen or done < 2:
            kept[done] = outputs
        done += 1
    return kept, done


def _no_cache(subject: Subject) -> Claim:
    claim = Claim(
        id="audit.no_cache",
        section="audit",
        requested=f"repeated inputs at most {share_text(_FASTER.relative)} faster than new ones",
        observed="not tested",
        verdict="skipped",
        code=ClaimCode.NOT_APPLICABLE,
        reason="no other inputs can be made of these: they are no NumPy arrays of numbers with several values",
        fix="give inputs with other values",
    )
    if not _differ(subject.feeds, _varied(subject.feeds, 1)):
        return claim
    times: dict[str, list[float]] = {"new": [], "later": [], "at once": []}
    ends = time.monotonic() + _CACHE_SECONDS
    worst: tuple[str, RatioComparison] | None = None
    for pairs in _PAIRS:
        while len(times["new"]) < pairs and (time.monotonic() < ends or len(times["new"]) < _PAIRS[0]):
            try:
                _time_once(subject, len(times["new"]), times)
            except XpuRuntimeError as error:
                reason = f"the model refuses inputs that were made of these: {error.reason}"
                return msgspec.structs.replace(claim, reason=reason)
        comparisons = {
            when: compare(times["new"], times[when], margin=_FASTER, looks=len(_PAIRS), family=2)
            for when in ("later", "at once")
        }
        worst = max(comparisons.items(), key=lambda item: item[1].ratio)
        cached = [comparison for comparison in comparisons.values() if comparison.verdict is RatioVerdict.SLOWER]
        if cached or all(comparison.within_limit for comparison in comparisons.values()) or time.monotonic() >= ends:
            break
    assert worst is not None
    return _decided(claim, comparisons, worst, len(times["new"]))


def _decided(
    claim: Claim, comparisons: dict[str, RatioComparison], worst: tuple[str, RatioComparison], pairs: int
) -> Claim:
    when, comparison = worst
    figures = {"pairs": float(pairs), "ratio": comparison.ratio, "low": comparison.low, "high": comparison.high}
    interval = f"{comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}]"
    observed = f"new inputs take {interval} of the time of repeated ones"
    claim = msgspec.structs.replace(claim, observed=observed, figures=figures, fix=None)
    if any(each.verdict is RatioVerdict.SLOWER for each in comparisons.values()):
        margin = share_text(comparison.margin)
        reason = f"inputs that were run before are faster ({when}), beyond {margin}: results are cached"
        fix = "turn the cache off, and time with inputs that differ"
        return msgspec.structs.replace(claim, verdict="fail", code=ClaimCode.CACHED, reason=reason, fix=fix)
    if all(each.within_limit for each in comparisons.values()):
        reason = f"{pairs} new inputs took as long as the same inputs again"
        return msgspec.structs.replace(claim, verdict="pass", code=ClaimCode.OK, reason=reason)
    reason = f"after {pairs} pairs the times of new and repeated inputs are too noisy to tell apart"
    fix = "run on a quieter machine, or leave audit out with --only"
    return msgspec.structs.replace(
        claim, verdict="inconclusive", code=ClaimCode.CACHE_UNDECIDED, reason=reason, fix=fix
    )


def _time_once(subject: Subject, number: int, times: dict[str, list[float]]) -> None:
    """Time new inputs, the same after others, and the same at once. Each timed run follows one of the same kind."""
    run, clock = subject.session.run, time.perf_counter
    tested, before, after = (_varied(subject.feeds, 3 * number + index + 1) for index in range(3))
    run(before)
    start = clock()
    run(tested)
    new = clock()
    run(after)
    again = clock()
    run(tested)
    later = clock()
    run(tested)
    times["new"].append(new - start)
    times["later"].append(later - again)
    times["at once"].append(clock() - later)


def _varied(feeds: dict[str, Any], number: int) -> dict[str, Any]:
    """Return inputs with the same shapes and, as far as that goes, the same values, in an order of their own."""
    # Floats are made a little smaller, too, so that no two numbers give equal inputs.
    import numpy as np

    arrays = {}
    for name, array in feeds.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            arrays[name] = array
            continue
        moved = np.roll(array.reshape(-1), number).reshape(array.shape)
        arrays[name] = (moved * (1 - number / 65536)).astype(array.dtype) if array.dtype.kind == "f" else moved
    return arrays


def _differ(feeds: dict[str, Any], others: dict[str, Any]) -> bool:
    return any(array is not feeds[name] and array.tobytes() != feeds[name].tobytes() for name, array in others.items())


_NAMED = 4
#: Differences of files, which are the same on any machine.
_OF_FILES = (DriftCode.MODEL, DriftCode.EXTERNAL_DATA, DriftCode.POLICY, DriftCode.CALIBRATION)


def _own_inputs(subject: Subject) -> dict[str, Any] | None:
    """Return the caller's inputs in the locked shapes: a model may refuse those that are generated."""
    if not subject.own_inputs or subject.locked is None or not subject.locked.identity.shapes:
        return None
    shapes = dict(subject.locked.identity.shapes[0].inputs)
    same = {name: tuple(np.shape(value)) for name, value in subject.feeds.items()} == shapes
    return dict(subject.feeds) if same else None


def lock_claims(subject: Subject) -> Iterator[Claim]:
    """Check the lock as ``xrt lock --check`` does, and yield a claim for each code of what differs."""
    locked = lock(subject.model, output=subject.lock, check=True, inputs=_own_inputs(subject), **subject.options)
    groups: dict[str, list[Difference]] = {}
    for drift in locked.drifts:
        groups.setdefault(drift.code, []).append(drift)
    identity = locked.lock.identity
    if not groups:
        entries, blind = len(identity.entries) + len(identity.calls), identity.unobservable
        yield Claim(
            id="evidence.lock",
            section="evidence",
            requested=f"as in {subject.lock}",
            observed=f"the same; {blind} kernels are not reported" if blind else "the same",
            verdict="pass",
            code=ClaimCode.OK,
            reason=f"{entries} entries and {len(identity.validators)} validators hold"
            + (f"; only validators stand for the kernels of {blind} entries, which are not reported" if blind else "")
            + "".join(f"; {missing.code} {missing.subject} is not in the lock" for missing in locked.lacking),
            figures={
                "entries": float(entries),
                "unobservable": float(blind),
                "validators": float(len(identity.validators)),
            },
        )
    elsewhere = not groups.keys().isdisjoint(MACHINE)
    take = f"`{accept_command(str(subject.model), str(subject.lock), groups)}`"
    for code, drifts in groups.items():
        first, remaining = drifts[0], len(drifts) - _NAMED
        of_policy = code == DriftCode.PLAN and DriftCode.POLICY in groups
        follows = "as for evidence.lock.policy, from which it follows" if of_policy else ""
        differs = ClaimCode.LOCK_STALE if first.validator else ClaimCode.LOCK_DIFFERS
        undecided = elsewhere and code not in _OF_FILES
        yield Claim(
            id=f"evidence.lock.{code}",
            section="evidence",
            requested=shown(first.before),
            observed=first.reason or shown(first.after),
            verdict="inconclusive" if undecided else "fail",
            code=ClaimCode.OTHER_MACHINE if undecided else differs,
            reason="; ".join(drift.text for drift in drifts[:_NAMED])
            + (f"; and {remaining} more" if remaining > 0 else ""),
            fix=follows or (f"{first.restore}. To take what is here: {take}" if first.restore else take),
            figures={"differences": float(len(drifts))},
            line=_line_of(first, subject.lock),
        )


def _line_of(drift: Difference, path: str | os.PathLike[str] | None) -> int:
    """Return the line of a lock, which has one record a line, with the record that differs, or that of its section."""
    lines = Path(path or "").read_text(encoding="utf-8").splitlines()
    name = json.dumps((*drift.entries, *drift.nodes, drift.subject)[0], ensure_ascii=False)
    records = [f'"unit":{name}', f'"name":{name}', f"[{name},", f'"{drift.code}": ', f'"{drift.code}s": ']
    if drift.validator:
        records = [f'"id":"{drift.validator}"', f'"kind":"{drift.code}"']
    numbers = (number for record in records for number, line in enumerate(lines, 1) if record in line)
    return next(numbers, 1)


#: Parts that a policy may require, to the policy keys that they are about.
_PARTS = {
    "engine": ("execution.engine",),
    "device": ("execution.device",),
    "precision": ("execution.precision",),
    "kernels": ("kernels.",),
}
_VERDICTS: dict[str, tuple[ClaimVerdict, ClaimCode]] = {
    "honoured": ("pass", ClaimCode.OK),
    "fallback": ("pass", ClaimCode.OK),
    "substituted": ("fail", ClaimCode.SUBSTITUTED),
    "unsupported": ("fail", ClaimCode.UNSUPPORTED),
    "inconclusive": ("inconclusive", ClaimCode.KEY_INCONCLUSIVE),
    "unobservable": ("unobservable", ClaimCode.UNOBSERVABLE),
}
#: Units that a reason names.
_UNITS = 4
_RUNS = 5


def evidence_claims(subject: Subject) -> Iterator[Claim]:
    """Run an instrumented copy of the session, and yield what its report shows; then what differs from the lock."""
    yield from observed_claims(subject, subject.session.explain(subject.feeds, runs=_RUNS))
    if subject.lock is not None:
        yield from lock_claims(subject)


def observed_claims(subject: Subject, report: Report) -> Iterator[Claim]:
    """Yield the claims of a report. Each key of the policy is one, and so is each part that ``verify`` requires."""
    checks = subject.limits.evidence
    required = tuple(key for part in checks.require for key in _PARTS.get(part, ()))
    allowed = [(pattern, Glob(pattern)) for pattern in checks.allow]
    fixes = {control.key: control.fix for control in subject.session.plan.controls}
    for observation in report.observations:
        claim = _claim(observation, fixes.get(observation.key))
        if claim.verdict == "unobservable" and _is_of(observation.key, required):
            claim = msgspec.structs.replace(
                claim,
                verdict="fail",
                code=ClaimCode.NOT_OBSERVED,
                reason=f"verify.evidence.require names it, and it was not observed: {observation.reason}",
                fix="run on an engine that reports it, or leave it out of verify.evidence.require",
            )
        pattern = next((text for text, matches in allowed if matches(observation.key)), None)
        if claim.verdict == "fail" and pattern is not None:
            reason = f"verify.evidence.allow has {pattern!r}: {claim.reason}"
            claim = msgspec.structs.replace(claim, verdict="skipped", code=ClaimCode.ALLOWED, reason=reason)
        yield subject.placed(claim, observation.key)
    if "placement" in checks.require:
        yield subject.placed(_placement(subject, report), "verify.evidence.require")
    if "kernels" in checks.require and not any(
        observation.key.startswith("kernels.") for observation in report.observations
    ):
        yield subject.placed(_kernels(report), "verify.evidence.require")
    yield from _whole(report)


def _claim(observation: Observation, fix: str | None) -> Claim:
    verdict, code = _VERDICTS[observation.status]
    return Claim(
        id=f"evidence.{observation.key}",
        section="evidence",
        requested=observation.requested,
        observed=observation.observed,
        verdict=verdict,
        code=code,
        reason=observation.reason,
        fix=None if verdict == "pass" else fix,
    )


def _is_of(key: str, parts: tuple[str, ...]) -> bool:
    return any(key == part or (part.endswith(".") and key.startswith(part)) for part in parts)


def _placement(subject: Subject, report: Report) -> Claim:
    """Return whether every unit that computes ran on the device of the plan, or is allowed elsewhere."""
    device, permitted = subject.session.plan.device, set(subject.policy.execution.allow_cpu_ops)
    units = computing(report.units)
    away = [unit for unit in units if unit.device != device and unit.op not in permitted]
    claim = Claim(
        id="evidence.placement",
        section="evidence",
        requested=f"every unit on {device}",
        observed=f"{len(units) - len(away)} of {len(units)} units on {device}",
        verdict="pass",
        code=ClaimCode.OK,
        reason=f"every unit that computes ran on {device}",
        figures={"units": len(units), "misplaced": len(away)},
    )
    if not units:
        return msgspec.structs.replace(
            claim,
            verdict="fail",
            code=ClaimCode.NOT_OBSERVED,
            reason="the engine reported no units",
            observed="no units",
        )
    if not away:
        return claim
    return msgspec.structs.replace(
        claim,
        verdict="fail",
        code=ClaimCode.MISPLACED,
        reason=f"not on {device}: {_named(away, lambda unit: unit.device)}",
        fix="name the operators in execution.allow_cpu_ops, or choose an engine that runs them there",
    )


def _kernels(report: Report) -> Claim:
    units = computing(report.units)
    unknown = [unit for unit in units if unit.kernel is None and not unit.device_kernels]
    known = bool(units) and not unknown
    return Claim(
        id="evidence.kernels",
        section="evidence",
        requested="the kernel of every unit",
        observed=f"known of {len(units) - len(unknown)} of {len(units)} units",
        verdict="pass" if known else "fail",
        code=ClaimCode.OK if known else ClaimCode.NOT_OBSERVED,
        reason="the kernel of every unit is known" if known else f"unknown kernels: {_named(unknown)}",
        fix=None if known else "run on an engine that reports kernels, or leave kernels out of verify.evidence.require",
        figures={"units": len(units), "unknown": len(unknown)},
    )


def _whole(report: Report) -> Iterator[Claim]:
    if report.observations and len(report.unobservable) == len(report.observations):
        yield Claim(
            id="evidence.observed",
            section="evidence",
            requested="at least one key observed",
            observed="none",
            verdict="inconclusive",
            code=ClaimCode.UNOBSERVABLE,
            reason="no key of the policy could be observed",
            fix="run on an engine that reports what it ran",
        )
    if report.partial:
        yield Claim(
            id="evidence.complete",
            section="evidence",
            requested="a whole instrumented pass",
            observed="incomplete",
            verdict="unobservable",
            code=ClaimCode.INCOMPLETE,
            reason="; ".join(report.notes) or "the instrumented pass broke off, or a source of records was missing",
        )


def _named(units: list[Unit], detail: object = None) -> str:
    shown = [f"{unit.id!r} ({unit.op}{f', {detail(unit)}' if callable(detail) else ''})" for unit in units[:_UNITS]]
    rest = f" and {len(units) - _UNITS} more" if len(units) > _UNITS else ""
    return (", ".join(shown) or "the engine reported no units") + rest
