# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of memory and start: growth over repeated runs, the peak of the process, and the time to open a session."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.locks.figures import START_MARGIN, peak_of_process, time_start
from xpuruntime.locks.verification.claims import Claim, ClaimCode, ClaimVerdict, elsewhere, not_locked
from xpuruntime.measuring.statistics import RatioVerdict
from xpuruntime.policies.kinds import duration_text, share_text
from xpuruntime.printable import bytes_text
from xpuruntime.runtime.cpu_and_memory import process_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.lockfile.records import Lock
    from xpuruntime.locks.verification.claims import Subject

__all__ = ["memory_claims", "start_claims"]

#: Runs before memory is looked at, in which engines fill their arenas; then the runs over which it may grow.
_WARM, _LEAST, _MOST = 20, 50, 2000
_SECONDS = 2.0
#: Growth of the process that is taken for that of Python's and the engine's allocators, whatever the share says.
_NOISE = 8 << 20
#: Times that a session is opened once more before a start is called slow.
_AGAIN = 2
#: Rounds of a start beside that of the reference, and seconds for them.
_START_ROUNDS, _START_BUDGET = (9, 31), 60.0


def memory_claims(subject: Subject) -> Iterator[Claim]:
    """Run the session repeatedly, and compare what is held before and after."""
    yield subject.placed(_growth(subject), "verify.memory.max_growth")
    limit = subject.limits.memory.max_peak
    if limit is not None:
        yield subject.placed(_peak(limit), "verify.memory.max_peak")
    if subject.locked is not None and subject.policy.verify is not None:
        yield subject.placed(_locked_peak(subject, subject.locked), "verify.memory.max_growth")


def _growth(subject: Subject) -> Claim:
    allowed = subject.limits.memory.max_growth
    requested = f"grows by at most {share_text(allowed)}"
    for _ in range(_WARM):
        subject.session.run(subject.feeds)
    before, ends, runs = _held(subject), time.monotonic() + _SECONDS, 0
    while runs < _LEAST or (runs < _MOST and time.monotonic() < ends):
        subject.session.run(subject.feeds)
        runs += 1
    after = _held(subject)
    grown = {owner: (held, after[owner]) for owner, held in before.items() if owner in after}
    if not grown:
        return Claim(
            id="memory.growth",
            section="memory",
            requested=requested,
            observed="-",
            verdict="unobservable",
            code=ClaimCode.UNOBSERVABLE,
            reason="neither the operating system nor the engine reports what is held",
        )
    over = {
        owner: pair
        for owner, pair in grown.items()
        if pair[1] - pair[0] > max(allowed * pair[0], _NOISE if owner == "process" else 0)
    }
    owner, (first, last) = max((over or grown).items(), key=lambda item: item[1][1] - item[1][0])
    share = (last - first) / first if first else 0.0
    return Claim(
        id="memory.growth",
        section="memory",
        requested=requested,
        observed=f"{owner}: {bytes_text(first)} -> {bytes_text(last)} over {runs} runs",
        verdict="fail" if over else "pass",
        code=ClaimCode.MEMORY_GROWTH if over else ClaimCode.OK,
        reason=(
            f"{owner} grew by {bytes_text(last - first)} ({share_text(share)}) over {runs} runs with the same inputs"
            if over
            else f"nothing grew by more than {share_text(allowed)} over {runs} runs"
        ),
        fix="report the leak to the engine, or limit its arena in execution.provider_options" if over else None,
        figures={"before_bytes": first, "after_bytes": last, "runs": runs},
    )


def _held(subject: Subject) -> dict[str, int]:
    held = {f"session: {owner}": size for owner, size in subject.session.memory().items()}
    resident = process_memory().resident
    return held if resident is None else {"process": resident, **held}


def _peak(limit: int) -> Claim:
    most = process_memory().most_resident
    verdict: ClaimVerdict = "unobservable" if most is None else "pass" if most <= limit else "fail"
    return Claim(
        id="memory.peak",
        section="memory",
        requested=f"at most {bytes_text(limit)}",
        observed=bytes_text(most),
        verdict=verdict,
        code={"unobservable": ClaimCode.UNOBSERVABLE, "pass": ClaimCode.OK, "fail": ClaimCode.MEMORY_PEAK}[verdict],
        reason="the operating system does not report the peak of a process"
        if most is None
        else f"the process held {bytes_text(most)} at most, this verification included",
        fix="use a smaller batch, or state more in verify.memory.max_peak" if verdict == "fail" else None,
        figures={} if most is None else {"peak_bytes": most, "limit_bytes": limit},
    )


def _locked_peak(subject: Subject, lock: Lock) -> Claim:
    """Compare what a process of its own holds at most with what such a process held when the lock was made."""
    id, expected = "memory.locked_peak", lock.measured.memory_peak
    if (claim := elsewhere(subject, id, "memory")) is not None:
        return claim
    if expected is None:
        return not_locked(id, "memory", "peak of a process", "the section verify")
    allowed = subject.limits.memory.max_growth
    limit = int(expected + max(allowed * expected, _NOISE))
    most = peak_of_process(subject.model, subject.policy, subject.feeds, trust=subject.trust)
    verdict: ClaimVerdict = "unobservable" if most is None else "pass" if most <= limit else "fail"
    reasons: dict[str, str] = {
        "unobservable": "no separate process could be measured while it opens and runs the model",
        "pass": f"within {share_text(allowed)} of what was locked",
        "fail": f"more than {share_text(allowed)} over what was locked",
    }
    return Claim(
        id=id,
        section="memory",
        requested=f"at most {bytes_text(limit)}, where {bytes_text(expected)} were locked",
        observed=bytes_text(most),
        verdict=verdict,
        code={"unobservable": ClaimCode.UNOBSERVABLE, "pass": ClaimCode.OK, "fail": ClaimCode.MEMORY_PEAK}[verdict],
        reason=reasons[verdict],
        fix=f"find what changed: `xrt diff {subject.lock} here MODEL`" if verdict == "fail" else None,
        figures={"locked_bytes": expected}
        if most is None
        else {"peak_bytes": most, "locked_bytes": expected, "limit_bytes": limit},
    )


def start_claims(subject: Subject) -> Iterator[Claim]:
    """Compare the time to open the session with the limit. A start that was slow is tried again: the best counts.

    With a lock, the ratio to the opening of the reference is compared with that of the lock, too.
    """
    limit = subject.limits.start
    if limit is None:
        return
    if subject.locked is not None:
        yield subject.placed(_locked_start(subject, subject.locked), "verify.start")
    times = [subject.opened_s]
    while min(times) > limit and len(times) <= _AGAIN:
        start = time.perf_counter()
        subject.reopen().close()
        times.append(time.perf_counter() - start)
    best, passed = min(times), min(times) <= limit
    claim = Claim(
        id="start",
        section="start",
        requested=f"at most {duration_text(limit)}",
        observed=f"{best:.3g}s",
        verdict="pass" if passed else "fail",
        code=ClaimCode.OK if passed else ClaimCode.SLOW_START,
        reason=f"the session was open after {best:.3g}s" + ("" if len(times) == 1 else f", the best of {len(times)}"),
        fix=None if passed else "compile the model once with `xrt compile`, or state more in verify.start",
        figures={"seconds": best, "limit_seconds": limit},
    )
    yield subject.placed(claim, "verify.start")


def _locked_start(subject: Subject, lock: Lock) -> Claim:
    id, expected = "start.locked", lock.measured.ratios.get("start")
    if (claim := elsewhere(subject, id, "start")) is not None:
        return claim
    if expected is None:
        return not_locked(id, "start", "ratio of the start to that of the reference", "verify.start")
    allowed = share_text(START_MARGIN.relative)
    claim = Claim(
        id=id,
        section="start",
        requested=f"at most {allowed} slower than {expected.ratio:.3f} of the reference's, as locked",
        observed="-",
        verdict="unobservable",
        code=ClaimCode.UNOBSERVABLE,
        reason="the model does not run as a reference, on the CPU",
    )
    budget = _START_BUDGET if subject.budget is None else subject.budget
    timed = time_start(
        subject.session, subject.model, subject.reopen, trust=subject.trust, rounds=_START_ROUNDS,
        expected=expected.high, budget=budget,
    )  # fmt: skip
    if timed is None:
        return claim
    session = timed.comparisons["session"]
    low, high, ratio = (value * expected.high for value in (session.low, session.high, session.ratio))
    claim = msgspec.structs.replace(
        claim,
        observed=f"{ratio:.3f} [{low:.3f}, {high:.3f}] of the reference's",
        figures={"ratio": ratio, "low": low, "high": high, "locked_ratio": expected.ratio, "rounds": session.rounds},
    )
    if session.verdict is RatioVerdict.SLOWER:
        fix = f"find what changed: `xrt diff {subject.lock} here MODEL`"
        reason = f"opening takes {share_text(session.ratio - 1)} longer than was locked"
        return msgspec.structs.replace(claim, verdict="fail", code=ClaimCode.SLOW_START, reason=reason, fix=fix)
    if session.within_limit:
        reason = f"within {allowed} of what was locked at a confidence of {session.confidence:g}"
        return msgspec.structs.replace(claim, verdict="pass", code=ClaimCode.OK, reason=reason)
    reason = f"after {session.rounds} rounds ({timed.ended}) it is not decided"
    fix = "give a longer --budget, or run on a quieter machine"
    return msgspec.structs.replace(
        claim, verdict="inconclusive", code=ClaimCode.START_UNDECIDED, reason=reason, fix=fix
    )
