# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of accuracy, generation, determinism, memory and start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.tolerances import RANDOM_FIX, OutputFigures, Tolerance
from xpuruntime.generation import SessionLogprobs, check_gates
from xpuruntime.inference.comparing import compare_session
from xpuruntime.inference.loading import reference_model_of
from xpuruntime.locks.create import START_MARGIN, peak_of_process, time_start
from xpuruntime.locks.determinism import session_determinism
from xpuruntime.locks.verification.claims import Claim, ClaimCode, ClaimVerdict, Subject, elsewhere, not_locked
from xpuruntime.locks.verification.metrics import metric_claim, metric_not_given
from xpuruntime.measuring.statistics import RatioVerdict
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES
from xpuruntime.policies.kinds import duration_text, share_text
from xpuruntime.printable import bytes_text
from xpuruntime.runtime.cpu_and_memory import process_memory

if TYPE_CHECKING:
    from xpuruntime.evidence.determinism import GradeTest
    from xpuruntime.generation import Gate
    from xpuruntime.lockfile.records import Lock

_FIX = "find the node with `xrt compare`, keep it in fp32 by a rule in kernels.rules, or widen `accuracy` in the policy"
_OTHER_INPUTS = "give inputs with --input for which the output has other values"


def accuracy_claims(subject: Subject) -> Iterator[Claim]:
    """Compare each output with the reference, then compute the metrics."""
    key = "accuracy" if subject.policy.accuracy is not None else "execution.precision"
    for claim in _outputs(subject):
        yield subject.placed(claim, key)
    for metric in subject.metrics:
        yield subject.placed(metric_claim(metric, subject.session), f"verify.metrics.{metric.name}")
    names = {metric.name for metric in subject.metrics}
    for name in (metric for metric in subject.limits.metrics if metric not in names):
        yield subject.placed(metric_not_given(name, subject.limits.metrics[name]), f"verify.metrics.{name}")


def _outputs(subject: Subject) -> Iterator[Claim]:
    try:
        session = compare_session(subject.session, subject.feeds)
    except XpuRuntimeError as error:  # the reference does not run: nothing is known of the outputs
        requested = "every output within the tolerance of its precision"
        yield _not_compared("outputs", requested, error.reason, "give inputs that the model takes with --input")
        return
    if session.not_run is not None or not session.outputs:
        reason = session.not_run or "the model has no output"
        yield _not_compared("outputs", _requested(session.tolerance), reason, _OTHER_INPUTS)
    for output in session.outputs:
        if output.name in subject.session.model.random_outputs:
            yield _not_compared(
                output.name, _requested(session.tolerance), f"{output.undecided} in this output", RANDOM_FIX
            )
        else:
            yield _output(output, session.tolerance)


def _output(figures_of: OutputFigures, tolerance: Tolerance) -> Claim:
    stated = {"max_abs": figures_of.max_abs, "max_rel": figures_of.max_rel, "cosine": figures_of.cosine}
    observed = f"max {figures_of.max_abs:.3g}, rel {figures_of.max_rel:.3g}, cosine "
    observed += "undefined" if figures_of.cosine is None else f"{figures_of.cosine:.6f}"
    figures = {name: value for name, value in stated.items() if value is not None and value < float("inf")}
    requested = _requested(tolerance)
    if figures_of.undecided:
        claim = _not_compared(figures_of.name, requested, f"{figures_of.undecided} in this output", _OTHER_INPUTS)
        return msgspec.structs.replace(claim, observed=observed, figures=figures)
    return Claim(
        id=f"accuracy.{figures_of.name}",
        section="accuracy",
        requested=requested,
        observed=observed,
        verdict="pass" if figures_of.passed else "fail",
        code=ClaimCode.OK if figures_of.passed else ClaimCode.OUT_OF_TOLERANCE,
        reason="within the tolerance of fp32 on the CPU" if figures_of.passed else figures_of.reason,
        fix=None if figures_of.passed else _FIX,
        figures=figures,
    )


def _not_compared(name: str, requested: str, reason: str, fix: str) -> Claim:
    return Claim(
        id=f"accuracy.{name}",
        section="accuracy",
        requested=requested,
        observed="not compared",
        verdict="inconclusive",
        code=ClaimCode.NOT_COMPARED,
        reason=reason,
        fix=fix,
    )


def generation_claims(subject: Subject) -> Iterator[Claim]:
    """Compare what the session says about the next tokens of held-out texts with what the reference says."""
    limits, session = subject.limits.generation, subject.session
    if limits is None:
        return
    try:
        candidate = SessionLogprobs(session.run, session.model)
        reference = reference_model_of(session._engine, session._request, session._machine)
        try:
            report = check_gates(SessionLogprobs(reference.run, session.model), candidate, limits)
        finally:
            reference.close()
    except XpuRuntimeError as error:
        for name in ("top1", "kl", "perplexity"):
            if getattr(limits, name) is not None:
                claim = _not_compared(name, f"{name} {getattr(limits, name)}", error.reason, error.fix or _FIX)
                claim = msgspec.structs.replace(claim, id=f"generation.{name}", section="generation")
                yield subject.placed(claim, f"verify.generation.{name}")
        return
    for gate in report.gates:
        yield subject.placed(_gate_claim(gate), f"verify.generation.{gate.name}")


def _gate_claim(gate: Gate) -> Claim:
    verdicts: dict[str, tuple[ClaimVerdict, ClaimCode, str | None]] = {
        "pass": ("pass", ClaimCode.OK, None),
        "fail": ("fail", ClaimCode.OUT_OF_TOLERANCE, _FIX),
        "inconclusive": ("inconclusive", ClaimCode.NOT_COMPARED, "write more texts, or longer texts"),
        "reported": ("skipped", ClaimCode.NOT_APPLICABLE, None),
    }
    verdict, code, fix = verdicts[gate.verdict]
    return Claim(
        id=f"generation.{gate.name}",
        section="generation",
        requested=gate.requested,
        observed=gate.observed,
        verdict=verdict,
        code=code,
        reason=gate.reason,
        fix=fix,
        figures=gate.figures,
    )


def _requested(tolerance: Tolerance) -> str:
    return f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}, cosine {tolerance.cosine:g}"


_DETERMINISM_FIX = "find the node with `xrt determinism`, or ask for a lower grade"


def determinism_claims(subject: Subject) -> Iterator[Claim]:
    """Test the higher of the grades of ``verify.determinism`` and ``execution.determinism``, and those below it."""
    stated = {
        "verify.determinism": subject.limits.determinism,
        "execution.determinism": subject.policy.execution.determinism,
    }
    key, grade = max(stated.items(), key=lambda item: DETERMINISM_GRADES.index(item[1]))
    if grade == "none":
        return
    inputs = subject.feeds if subject.own_inputs else None
    determinism = session_determinism(subject.session, grade, inputs=inputs, trust=subject.trust)
    broken = any(test.verdict == "failed" for test in determinism.tests)
    for test in determinism.tests:
        yield subject.placed(_grade_claim(test, broken=broken), key)


def _grade_claim(test: GradeTest, *, broken: bool) -> Claim:
    untested: tuple[ClaimVerdict, ClaimCode] = (
        ("skipped", ClaimCode.NOT_APPLICABLE) if broken else ("inconclusive", ClaimCode.NOT_TESTED)
    )
    verdicts: dict[str, tuple[ClaimVerdict, ClaimCode]] = {
        "passed": ("pass", ClaimCode.OK),
        "failed": ("fail", ClaimCode.NONDETERMINISTIC),
        "not_applicable": ("skipped", ClaimCode.NOT_APPLICABLE),
        "not_tested": untested,
    }
    verdict, code = verdicts[test.verdict]
    first = test.first_difference
    figures = {"trials": float(test.trials)}
    if first is not None and first.ulp_max is not None:
        figures["ulp_max"] = float(first.ulp_max)
    return Claim(
        id=f"determinism.{test.grade}",
        section="determinism",
        requested="the same bits",
        observed=f"{test.verdict.replace('_', ' ')}, {test.trials} results compared",
        verdict=verdict,
        code=code,
        reason=test.reason if first is None else f"{test.reason}; first difference: {first}",
        fix=_DETERMINISM_FIX if verdict == "fail" else None,
        figures=figures,
    )


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
