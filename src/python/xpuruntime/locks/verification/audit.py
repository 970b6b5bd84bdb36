# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of audits: timed runs do the same work as untimed ones, and results are not cached."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.tolerances import RANDOM_FIX, compare_within
from xpuruntime.inference.comparing import tolerance_of
from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.measuring.statistics import Margin, RatioVerdict, compare
from xpuruntime.policies.kinds import share_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.locks.verification.claims import Subject
    from xpuruntime.measuring.statistics import RatioComparison

__all__ = ["audit_claims"]

#: Pairs of new and repeated inputs after which the times are compared, seconds for them, and what counts: less than ten
#: microseconds come from the caches and branch predictors of processors, too.
_PAIRS, _CACHE_SECONDS = (40, 80, 160, 320), 6.0
_FASTER = Margin(0.10, 10e-6)
#: Timed runs, as far as they take no longer than this, and how many of their outputs are kept.
_RUNS, _SECONDS, _KEPT = 200, 1.0, 8


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
    chosen = set(draw.sample(range(_RUNS), _KEPT))
    start = last = time.perf_counter()
    done = 0
    while done < _RUNS and (last - start < _SECONDS or done < _KEPT):
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
    """Return inputs with the same shapes and, as far as that goes, the same values, in an order of their own.

    Floats are made a little smaller, too, so that no two numbers give equal inputs.
    """
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
    """Whether any of the arrays that `_varied` made is another."""
    return any(array is not feeds[name] and array.tobytes() != feeds[name].tobytes() for name, array in others.items())
