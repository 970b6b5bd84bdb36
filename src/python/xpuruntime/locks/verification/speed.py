# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of speed, by rounds in turns with a control."""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from xpuruntime.errors import InputError, XpuRuntimeError, XpuRuntimeWarning
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.environments import MODULE, session_worker
from xpuruntime.locks.verification.claims import Claim, ClaimCode, Subject, elsewhere, expected_ratio
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import in_worker, measure, timed
from xpuruntime.measuring.statistics import (
    Margin,
    RatioComparison,
    RatioVerdict,
    compare,
    holm,
    require_runs,
    runs_required,
)
from xpuruntime.policies import Policy, VerifySpeed
from xpuruntime.policies.kinds import share_text
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.measured import LockedRatio
    from xpuruntime.measuring.rounds import RoundTimes, Sampler
    from xpuruntime.policies import VerifySpeed
    from xpuruntime.policies.verify_policy import Control

#: Products of the anchor, so that they take about as long as its copy.
_PRODUCTS = 20


class Pair(NamedTuple):
    """The session and its control, each as `xpuruntime.measuring.rounds.measure` takes it; and what the control is."""

    session: Sampler
    control: Sampler
    what: str


class ControlError(XpuRuntimeError):
    """There is no control to compare with. Private to the sections: it becomes a claim."""


def open_pair(subject: Subject, stack: ExitStack) -> Pair:
    """Open the control of a subject, and whatever the session is timed in. `stack` closes them."""
    if subject.against is not None:
        return _workers(subject, subject.against, stack)
    stated = subject.limits.speed
    control = "reference" if stated is None else stated.control
    if control == "anchor" and subject.locked is None:
        raise ControlError("an anchor says how fast a machine is, and only a lock has a ratio to it to compare with")
    feeds, session = subject.feeds, subject.session.run
    beside, what = open_control(control, subject.session, subject.model, feeds, stack, trust=subject.trust)
    return Pair(timed(lambda: session(feeds)), beside, what)


def open_control(
    control: Control, session: InferenceSession, model: Any, feeds: dict[str, Any], stack: ExitStack, *, trust: bool
) -> tuple[Sampler, str]:
    """Return a control in this process, and what it is. `stack` closes it."""
    if control == "anchor":
        return timed(_anchor()), "the anchor, a fixed NumPy workload"
    try:
        reference = stack.enter_context(open_reference(session, model, trust=trust))
        reference.run(feeds)
    except XpuRuntimeError as error:
        msg = f"the model does not run as a reference, on the CPU: {error.reason}"
        raise ControlError(msg, fix=error.fix) from None
    run = reference.run
    threads = session.policy.execution.threads
    stated = "without a policy" if threads is None else f"with execution.threads {threads} alone"
    return timed(lambda: run(feeds)), f"{reference.plan.engine}@cpu {stated}"


def open_reference(session: InferenceSession, model: Any, *, trust: bool) -> InferenceSession:
    """Open the model of a session on the CPU with its number of threads, and nothing else of its policy."""
    from xpuruntime.inference import InferenceSession

    engine = "onnxruntime" if session.model.format == "onnx" else session.plan.engine
    threads = session.policy.execution.threads
    policy = Policy.coerce({"execution": {"engine": engine, "device": "cpu", "threads": threads}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        return InferenceSession(model, policy=policy, trust=trust)


def _anchor() -> Callable[[], None]:
    """Return a fixed workload: products of matrices too small for threads, and a copy too large for small caches."""
    import numpy as np

    factor = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    product, source, target = np.empty_like(factor), np.ones(1 << 19, np.float32), np.empty(1 << 19, np.float32)

    def run() -> None:
        for _ in range(_PRODUCTS):
            np.matmul(factor, factor, out=product)
        np.copyto(target, source)

    return run


def _workers(subject: Subject, python: str, stack: ExitStack) -> Pair:
    if not isinstance(subject.model, (str, os.PathLike)):
        raise ControlError("another interpreter needs the file of a model, and this is a module in memory")
    inputs = Path(stack.enter_context(ScratchFolder("verify")), "inputs")
    write_arrays(inputs, subject.feeds)
    model = str(Path(subject.model).resolve())
    arguments = {"policy": subject.policy.replace(verify=None).to_dict(), "trust": subject.trust}
    samplers, what = [], python
    for interpreter in (sys.executable, python):
        worker = stack.enter_context(session_worker(interpreter))
        facts = worker.call(f"{MODULE}:open_session", model=model, inputs=str(inputs), arguments=arguments)
        samplers.append(in_worker(worker, f"{MODULE}:time_session"))
        what = f"{interpreter} ({facts['engine']} {facts['engine_version']}, xpuruntime {facts['xpuruntime']})"
    return Pair(samplers[0], samplers[1], what)


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
            expected = elsewhere(subject, f"speed.{metric}", "speed") or expected_ratio(subject, metric, checks)
            if isinstance(expected, Claim):
                yield subject.placed(expected, "verify.speed")
            else:
                ratios[metric] = expected
        if not ratios:
            return
        checks = checks.replace(metric=tuple(ratios))
    ends = time.monotonic() + (checks.budget if subject.budget is None else subject.budget)
    with ExitStack() as stack:
        try:
            pair = open_pair(subject, stack)
            findings = [
                _found(metric, pair, checks, ends - time.monotonic(), ratios.get(metric)) for metric in checks.metric
            ]
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
    timed = time_metric(metric, pair.session, pair.control, checks, left, expected=locked.high)
    return timed._replace(locked=locked, figures={**timed.figures, "locked_ratio": locked.ratio})


def decide(findings: Sequence[TimedMetric], checks: VerifySpeed, control: str, lock: str = "") -> list[Claim]:
    """Return the claims. All of them are decided together, by the method of Holm."""
    known = {finding.metric: finding.comparison for finding in findings if finding.comparison is not None}
    slower = holm([ratio.p_slower for ratio in known.values()], confidence=checks.confidence)
    within = holm([ratio.p_within_limit for ratio in known.values()], confidence=checks.confidence)
    flags = dict(zip(known, zip(slower, within, strict=True), strict=True))
    return [_claim(finding, flags.get(finding.metric, (False, False)), checks, control, lock) for finding in findings]


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


def _claim(timed: TimedMetric, flags: tuple[bool, bool], checks: VerifySpeed, control: str, lock: str) -> Claim:
    locked = timed.locked
    if locked is not None:
        control = f"{locked.ratio:.3f} [{locked.low:.3f}, {locked.high:.3f}] of {control}, as locked"
    claim = _unmeasured(timed.metric, timed.reason, checks, control)
    comparison = timed.comparison
    if comparison is None:
        return msgspec.structs.replace(claim, figures=timed.figures)
    figures = {
        **timed.figures,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "rounds": float(comparison.rounds),
    }
    scale = 1.0 if locked is None else locked.high
    observed = (
        f"{comparison.ratio * scale:.3f} [{comparison.low * scale:.3f}, {comparison.high * scale:.3f}] of the control"
    )
    claim = msgspec.structs.replace(claim, observed=observed, figures={**figures, "margin": comparison.margin})
    if comparison.margin > checks.max_slowdown:
        smallest = f"or {SMALLEST * 1e6:g} us, which are {share_text(comparison.margin)} here, slower"
        claim = msgspec.structs.replace(claim, requested=claim.requested.replace("slower", smallest, 1))
    limit, remarks = 1 + comparison.margin, "".join(f"; {remark}" for remark in timed.remarks)
    if comparison.too_noisy and comparison.verdict is not RatioVerdict.SLOWER and not comparison.within_limit:
        split = comparison.control_split
        apart = "" if split is None else f", {split.ratio:.3f} [{split.low:.3f}, {split.high:.3f}]"
        reason = f"the control differs from itself by more than half of the margin{apart}{remarks}"
        return msgspec.structs.replace(claim, code=ClaimCode.NOISY, reason=reason, fix=_QUIETER)
    if timed.busy:
        reason = f"the medians and the fastest calls lie on different sides of {limit:.3f}: {timed.busy}{remarks}"
        return msgspec.structs.replace(claim, code=ClaimCode.NOISY, reason=reason, fix=_QUIETER)
    if flags[0] and comparison.low > limit:
        reason = (
            f"slower by {share_text(comparison.ratio - 1)}, where {share_text(comparison.margin)} are allowed{remarks}"
        )
        fix = "find what changed with two reports: `xrt explain before.json after.json`"
        if locked is not None:
            fix = f"find what changed: `xrt diff {lock} here MODEL`"
        return msgspec.structs.replace(claim, verdict="fail", code=ClaimCode.SLOWER, reason=reason, fix=fix)
    if locked is not None and (doubt := locked.doubt(timed.metric, comparison.margin)):
        return msgspec.structs.replace(claim, code=ClaimCode.NOISY, reason=doubt, fix=_MEASURED_AGAIN)
    if flags[1] and comparison.high < limit:
        what = "the control" if locked is None else "what was locked"
        reason = f"within {share_text(comparison.margin)} of {what} at a confidence of {checks.confidence:g}{remarks}"
        return msgspec.structs.replace(claim, verdict="pass", code=ClaimCode.OK, reason=reason)
    reason = f"after {comparison.rounds} rounds ({timed.ended}) the interval still holds the limit {limit:.3f}{remarks}"
    fix = "state a longer verify.speed.budget, or run on a quieter machine"
    return msgspec.structs.replace(claim, reason=reason, fix=fix)


#: Rounds of medians, the fewest and the most, also of a ratio that is kept; and of percentiles, looked at once.
_ROUNDS, _KEPT_ROUNDS, _TAIL_ROUNDS = (9, 121), (41, 1000), 15
#: Runs of a turn from which a 99th percentile is taken, and seconds of a sample below which `measure` joins calls.
_TAIL_RUNS, _SAMPLE = 100, 20e-6
#: The smallest difference that counts, in seconds.
SMALLEST = 2e-6
#: The share of calls that are the fastest: those that waited for no processor, also on a busy machine.
_FASTEST = 0.05


class TimedMetric(NamedTuple):
    """One metric: how it compares with the control, or why it does not.

    Where `locked` is there, ratios are shares of its upper end: one is as slow as the lock allows without any margin.
    `busy` says that the machine had more work than processors and that the fastest calls lie on the other side of the
    limit than the medians: then one process may have waited for processors, and nothing is decided.
    """

    metric: str
    comparison: RatioComparison | None
    figures: dict[str, float]
    remarks: Sequence[str]
    reason: str = ""
    ended: str = ""
    locked: LockedRatio | None = None
    busy: str = ""


def time_metric(
    metric: str,
    session: Sampler,
    control: Sampler,
    checks: VerifySpeed,
    left: float,
    *,
    expected: float = 1.0,
    keep: bool = False,
) -> TimedMetric:
    """Time a session beside its control until it is decided whether it is slower than the margin allows.

    A ratio that is to be kept is timed until it is known to half of the margin.
    """
    family = len(checks.metric)
    margin = Margin(checks.max_slowdown, SMALLEST)
    variants = {"control": control, "session": session}
    budget = max(left, 1.0)
    if metric == "latency.p50":
        measurement = measure(
            variants,
            control="control",
            margin=margin,
            confidence=checks.confidence,
            rounds=_KEPT_ROUNDS if keep else _ROUNDS,
            budget=budget,
            settled=_known if keep else _settled,
            family=family,
            expected=expected,
        )
        figures = {
            "session_us": float(np.median(measurement.rounds["session"])) * 1e6,
            "control_us": float(np.median(measurement.rounds["control"])) * 1e6,
        }
        comparison = measurement.comparisons["session"]
        busy = _contradicted(comparison, measurement, expected)
        return TimedMetric(
            metric, comparison, figures, measurement.conditions.remarks(), ended=measurement.ended, busy=busy
        )
    return _tail(metric, variants, checks, margin, budget, expected)


def _settled(comparisons: Mapping[str, RatioComparison]) -> bool:
    return all(
        comparison.within_limit or comparison.verdict is RatioVerdict.SLOWER for comparison in comparisons.values()
    )


def _known(comparisons: Mapping[str, RatioComparison]) -> bool:
    """Whether ratios are known to half of the margin, as `LockedRatio.doubt` wants it."""
    return all(comparison.high / comparison.ratio - 1 <= comparison.margin / 2 for comparison in comparisons.values())


def _contradicted(comparison: RatioComparison, rounds: RoundTimes, expected: float) -> str:
    """Return how the fastest calls contradict the medians on a machine with more work than processors, else nothing."""
    # Rounds that alternate see a disturbance that comes and goes. They do not see a process that waits for processors
    # in all rounds while the other one does not.
    load, cores = rounds.conditions.load, rounds.conditions.cores
    if load is None or not cores or max(load) <= cores:
        return ""
    session, control = (float(np.quantile(rounds.calls[name], _FASTEST)) for name in ("session", "control"))
    ratio, limit = session / (control * expected), 1 + comparison.margin
    if (comparison.low > limit and ratio < limit) or (comparison.high < limit and ratio > limit):
        return f"the fastest {_FASTEST:.0%} of the calls have a ratio of {ratio:.3f}"
    return ""


def _tail(
    metric: str, variants: Mapping[str, Sampler], checks: VerifySpeed, margin: Margin, budget: float, expected: float
) -> TimedMetric:
    least = runs_required(0.99)
    singles = {name: _single(sampler) for name, sampler in variants.items()}
    once = max(float(np.median(pair(1, 5))) for pair in singles.values())
    most = _TAIL_ROUNDS * 3 * _TAIL_RUNS * once
    if most > budget:
        reason = (
            f"p99 takes {least} runs of each side at least, and {_TAIL_ROUNDS} turns of {_TAIL_RUNS} runs would take "
            f"{most:.0f} s of the {budget:.0f} s that are left: state a longer verify.speed.budget, or latency.p50"
        )
        return TimedMetric(metric, None, {}, (), reason)
    measurement = measure(
        singles,
        control="control",
        margin=margin,
        confidence=checks.confidence,
        rounds=(_TAIL_ROUNDS, _TAIL_ROUNDS),
        budget=budget,
        block=_TAIL_RUNS * max(once, _SAMPLE),
        settled=lambda _: False,
    )
    times, control, twin = _percentiles(measurement)
    runs = len(measurement.calls["session"])
    try:
        require_runs(0.99, runs, confidence=checks.confidence)
    except InputError as error:
        return TimedMetric(metric, None, {"runs": float(runs)}, measurement.conditions.remarks(), str(error))
    family = len(checks.metric)
    scaled = [[expected * ratio for ratio in side] for side in (control, twin)]
    comparison = compare(times, scaled[0], twin=scaled[1], margin=margin, confidence=checks.confidence, family=family)
    figures = {
        "session_us": float(np.median(times)) * 1e6,
        "control_us": float(np.median(control)) * 1e6,
        "runs": float(runs),
    }
    return TimedMetric(metric, comparison, figures, measurement.conditions.remarks(), ended=measurement.ended)


def _single(sampler: Sampler) -> Sampler:
    """Return a variant whose samples are single runs, whatever number of calls a sample is asked to have."""
    return lambda calls, samples: [sample * calls for sample in sampler(1, samples)]


def _percentiles(measured: RoundTimes) -> tuple[list[float], list[float], list[float]]:
    rounds = len(measured.twin)
    session = np.asarray(measured.calls["session"]).reshape(rounds, -1)
    control = np.asarray(measured.calls["control"]).reshape(rounds, 2, -1)
    both = np.percentile(control, 99, axis=2)
    return np.percentile(session, 99, axis=1).tolist(), both[:, 0].tolist(), both[:, 1].tolist()


def machine_conditions() -> dict[str, str]:
    """Return the processor, the load, and the versions of Python and NumPy."""
    import numpy as np

    facts = {"platform": platform.platform(), "python": sys.version.split()[0], "numpy": np.__version__}
    facts["processors"] = str(os.cpu_count() or "unknown")
    try:
        facts["load average"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
    except (OSError, AttributeError):
        facts["load average"] = "unknown"
    return facts
