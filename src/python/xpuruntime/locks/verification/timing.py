# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`time_metric`: one metric of speed of a session, in rounds that alternate with its control."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xpuruntime.errors import InputError
from xpuruntime.measuring.rounds import measure
from xpuruntime.measuring.statistics import Margin, RatioVerdict, compare, require_runs, runs_required

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.lockfile.measured import LockedRatio
    from xpuruntime.measuring.rounds import RoundTimes, Sampler
    from xpuruntime.measuring.statistics import RatioComparison
    from xpuruntime.policies import VerifySpeed

__all__ = ["SMALLEST", "TimedMetric", "machine_conditions", "time_metric"]

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
        found = measure(
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
            "session_us": float(np.median(found.rounds["session"])) * 1e6,
            "control_us": float(np.median(found.rounds["control"])) * 1e6,
        }
        comparison = found.comparisons["session"]
        busy = _contradicted(comparison, found, expected)
        return TimedMetric(metric, comparison, figures, found.conditions.remarks(), ended=found.ended, busy=busy)
    return _tail(metric, variants, checks, margin, budget, expected)


def _settled(comparisons: Mapping[str, RatioComparison]) -> bool:
    return all(
        comparison.within_limit or comparison.verdict is RatioVerdict.SLOWER for comparison in comparisons.values()
    )


def _known(comparisons: Mapping[str, RatioComparison]) -> bool:
    """Whether ratios are known to half of the margin, as `LockedRatio.doubt` wants it."""
    return all(comparison.high / comparison.ratio - 1 <= comparison.margin / 2 for comparison in comparisons.values())


def _contradicted(comparison: RatioComparison, found: RoundTimes, expected: float) -> str:
    """Return how the fastest calls contradict the medians on a machine with more work than processors, else nothing.

    Rounds that alternate see a disturbance that comes and goes. They do not see a process that waits for processors
    in all rounds while the other one does not.
    """
    load, cores = found.conditions.load, found.conditions.cores
    if load is None or not cores or max(load) <= cores:
        return ""
    session, control = (float(np.quantile(found.calls[name], _FASTEST)) for name in ("session", "control"))
    ratio, limit = session / (control * expected), 1 + comparison.margin
    if (comparison.low > limit and ratio < limit) or (comparison.high < limit and ratio > limit):
        return f"the fastest {_FASTEST:.0%} of the calls have a ratio of {ratio:.3f}"
    return ""


def _tail(
    metric: str, variants: Mapping[str, Sampler], checks: VerifySpeed, margin: Margin, budget: float, expected: float
) -> TimedMetric:
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
        return TimedMetric(metric, None, {}, (), reason)
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
        return TimedMetric(metric, None, {"runs": float(runs)}, found.conditions.remarks(), str(error))
    family = len(checks.metric)
    scaled = [[expected * one for one in side] for side in (control, twin)]
    comparison = compare(times, scaled[0], twin=scaled[1], margin=margin, confidence=checks.confidence, family=family)
    figures = {
        "session_us": float(np.median(times)) * 1e6,
        "control_us": float(np.median(control)) * 1e6,
        "runs": float(runs),
    }
    return TimedMetric(metric, comparison, figures, found.conditions.remarks(), ended=found.ended)


def _single(sampler: Sampler) -> Sampler:
    """Return a variant whose samples are single runs, whatever number of calls a sample is asked to have."""
    return lambda calls, samples: [one * calls for one in sampler(1, samples)]


def _percentiles(found: RoundTimes) -> tuple[list[float], list[float], list[float]]:
    """Return the 99th percentile of each turn of the session, and of the control's two turns of each round."""
    rounds = len(found.twin)
    session = np.asarray(found.calls["session"]).reshape(rounds, -1)
    control = np.asarray(found.calls["control"]).reshape(rounds, 2, -1)
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
