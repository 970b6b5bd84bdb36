# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interleaved rounds: several things timed side by side, so that what drifts meets all of them.

Each round times a block of calls of every variant. The order is rotated from pair to pair of rounds and reversed in the
second of each pair, and the control is timed twice a round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from xpuruntime.errors import InputError
from xpuruntime.measuring.conditions import Conditions, between, moment
from xpuruntime.measuring.statistics import Margin, RatioComparison, RatioVerdict, compare, look_rounds

if TYPE_CHECKING:
    from xpuruntime.measuring.tuning_watch import TuningStep
    from xpuruntime.policies import TuningPolicy
    from xpuruntime.runtime.worker import Worker

    Sampler = Callable[[int, int], Sequence[float]]
    Settled = Callable[[Mapping[str, RatioComparison]], bool]

#: Seconds of one sample at least, so that reading the clock is a small part of it.
_SAMPLE = 20e-6


class Progress(NamedTuple):
    """Where a measurement stands."""

    rounds: int
    most_rounds: int
    seconds: float
    comparisons: Mapping[str, RatioComparison]


class RoundTimes(NamedTuple):
    """Times of the rounds, and what they say."""

    control: str
    rounds: dict[str, list[float]]
    twin: list[float]
    calls: dict[str, list[float]]
    comparisons: dict[str, RatioComparison]
    ended: Literal["decided", "rounds", "budget", "cancelled"]
    conditions: Conditions
    #: Variants beside those that `measure` was to pair them with.
    paired: dict[str, RatioComparison] = {}  # noqa: RUF012 - of a tuple


def time_calls(
    run: Callable[[], Any], calls: int, samples: int, finish: Callable[[], Any] | None = None
) -> list[float]:
    """Return the seconds of `samples` times so many calls; each of them ends with one of `finish`, inside its time."""
    clock, clocks = time.perf_counter, []
    for _ in range(samples):
        start = clock()
        for _ in range(calls):
            run()
        if finish is not None:
            finish()
        clocks.append(clock() - start)
    return clocks


def timed(run: Callable[[], Any], finish: Callable[[], Any] | None = None) -> Sampler:
    """Return a variant of `measure` that is a function of this process."""
    return lambda calls, samples: time_calls(run, calls, samples, finish)


def in_worker(worker: Worker, function: str, /, **arguments: Any) -> Sampler:
    """Return a variant of `measure` that is a function of a worker.

    It is called with `calls`, `samples` and the arguments, and returns what `time_calls` does: the loop is timed there.
    """
    return lambda calls, samples: worker.call(function, calls=calls, samples=samples, **arguments)


def decided(comparisons: Mapping[str, RatioComparison]) -> bool:
    """Whether every comparison has a verdict."""
    return all(comparison.verdict is not RatioVerdict.INCONCLUSIVE for comparison in comparisons.values())


def measure(
    variants: Mapping[str, Sampler],
    *,
    control: str,
    margin: Margin | None = None,
    confidence: float = 0.99,
    rounds: tuple[int, int] = (9, 1000),
    budget: float = 120.0,
    block: float = 0.02,
    warm: float = 0.1,
    statistic: Literal["median", "mean"] = "median",
    settled: Settled = decided,
    family: int | None = None,
    widen: bool = False,
    expected: float = 1.0,
    pairs: Mapping[str, str] = MappingProxyType({}),
    drop_slower: bool = False,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
) -> RoundTimes:
    """Time variants in interleaved rounds until they are decided.

    Where `pairs` gives a variant another one, it is compared with both that one and the control. With `drop_slower`,
    which is for no `pairs`, one that was decided to be slower is not timed any more.
    """
    if control not in variants or len(variants) < 2:
        msg = (
            f"there is nothing to compare {control!r} with in {sorted(variants)}: give the control and another variant"
        )
        raise InputError(msg)
    began, before = time.monotonic(), moment()
    others = [name for name in variants if name != control]
    family = family or len(others) + len(pairs)
    looks = look_rounds(*rounds, confidence=confidence, family=family)
    sizes = {name: _size(sampler, block, warm) for name, sampler in variants.items()}
    turns = [control, *others, None]  # None is the control's second turn
    times: dict[str, list[float]] = {name: [] for name in variants}
    calls: dict[str, list[float]] = {name: [] for name in variants}
    twin: list[float] = []
    comparisons: dict[str, RatioComparison] = {}
    paired: dict[str, RatioComparison] = {}
    ended: Literal["decided", "rounds", "budget", "cancelled"] | None = None
    looked = 0

    def look() -> None:
        nonlocal looked
        looked = len(twin)
        comparisons.update(
            (name, compare(times[name], [expected * sample for sample in times[control]],
                           twin=[expected * sample for sample in twin], margin=margin, confidence=confidence,
                           looks=len(looks) + 1, family=family, seed=seed, widen=widen))
            for name in others
            if len(times[name]) == len(twin)
        )  # fmt: skip
        for name, other in pairs.items():
            paired[name] = compare(times[name], times[other], margin=margin, confidence=confidence,
                                   looks=len(looks) + 1, family=family, seed=seed, widen=widen)  # fmt: skip
        if progress is not None:
            progress(Progress(len(twin), looks[-1], time.monotonic() - began, comparisons))

    while ended is None:
        this_round: dict[str | None, float] = {}
        if drop_slower:
            turns = [turn for turn in turns if turn not in comparisons or _still(comparisons[turn])]
        for turn in rotated(turns, len(twin)):
            if cancel is not None and cancel():
                ended = "cancelled"
                break
            name = turn or control
            size, samples = sizes[name]
            seconds = np.asarray(variants[name](size, samples), dtype=float) / size
            calls[name] += seconds.tolist()
            this_round[turn] = float(np.median(seconds) if statistic == "median" else np.mean(seconds))
        if ended is not None:
            break
        for name in filter(None, turns):
            times[name].append(this_round[name])
        twin.append(this_round[None])
        if len(twin) in looks:
            look()
            if settled(comparisons) and settled(paired):
                ended = "decided"
            elif len(twin) >= looks[-1]:
                ended = "rounds"
        if ended is None and time.monotonic() - began > budget:
            ended = "budget"
    if looked < len(twin):
        look()
    return RoundTimes(control, times, twin, calls, comparisons, ended, between(before, moment()), paired)


def _still(comparison: RatioComparison) -> bool:
    return comparison.verdict is not RatioVerdict.SLOWER


def rounds_of(
    cases: Mapping[str, Callable[[], Any]],
    *,
    calls: int,
    rounds: int,
    warm: int = 50,
    finish: Callable[[], Any] | None = None,
    rotate: bool = False,
) -> dict[str, list[float]]:
    """Return seconds a call of several functions, the mean of each round."""
    for run in cases.values():
        time_calls(run, max(warm, 1), 1, finish)
    names = list(cases)
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number) if rotate else names:
            results[name].append(time_calls(cases[name], calls, 1, finish)[0] / calls)
    return results


def rotated(turns: Sequence[Any], number: int) -> list[Any]:
    """Return the order of turns in a round: ABBA, and for more than two another first one in every pair of rounds."""
    first = number // 2 % len(turns)
    order = [*turns[first:], *turns[:first]]
    return order[::-1] if number % 2 else order


def _size(sampler: Sampler, block: float, warm: float) -> tuple[int, int]:
    calls, until, quickest = 1, time.monotonic() + warm, math.inf
    while True:
        seconds = max(min(sampler(calls, 1)), 1e-9)
        quickest = min(quickest, seconds / calls)
        if time.monotonic() >= until and (seconds >= _SAMPLE or calls >= 1 << 20):
            break
        if seconds < _SAMPLE:
            calls = min(calls * 2, 1 << 20)
    calls = max(1, math.ceil(_SAMPLE / quickest))
    return calls, max(1, math.ceil(block / (calls * quickest)))


#: Another word whenever kernels are measured or chosen in another way, so that records of before do not hold.
PROTOCOL = "6"
#: Rounds before the first look at the times, and the most; the core's tuner has the same.
ROUNDS = (7, 61)


class KernelTiming(NamedTuple):
    """One kernel that was measured; `peak_bytes` is ``None`` where its memory was not."""

    kernel: str
    config: str
    microseconds: float
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    verdict: str = "control"
    peak_bytes: int | None = None


class Replacement(NamedTuple):
    """What was measured, the chosen kernel first."""

    candidates: tuple[KernelTiming, ...]
    rounds: int
    seconds: float
    undecided: bool
    cancelled: bool = False

    @property
    def chosen(self) -> KernelTiming:
        """The kernel that is to run."""
        return self.candidates[0]


def choose(
    variants: Mapping[str, Sampler],
    *,
    control: str,
    rule: TuningPolicy,
    block: float = 0.002,
    warm: bool = True,
    step: TuningStep | None = None,
) -> Replacement:
    """Measure kernels in interleaved rounds and decide which one is to run; `warm` says whether to warm them before."""
    began = time.monotonic()
    if len(variants) == 1:
        (sampler,) = variants.values()
        return Replacement((KernelTiming(control, "", sampler(1, 1)[0] * 1e6),), 0, rule.budget, undecided=False)
    turns = 0

    def cancel() -> bool:
        nonlocal turns
        number, place = divmod(turns, len(variants) + 1)
        turns += 1
        if step is None or place:
            return False
        return step(len(variants), number, ROUNDS[1], time.monotonic() - began)

    measured = measure(
        variants, control=control, confidence=rule.confidence, rounds=ROUNDS, budget=rule.budget, block=block,
        warm=block * warm, widen=True, settled=_settled, drop_slower=True, cancel=cancel,
        margin=Margin(rule.min_effect, 0.0),
    )  # fmt: skip
    if step is not None:
        step.end(time.monotonic() - began)
    microseconds = {name: statistics.median(times) * 1e6 for name, times in measured.rounds.items() if times}
    timings = [KernelTiming(control, "", microseconds.get(control, 0.0))]
    timings += [
        KernelTiming(name, "", microseconds[name], comparison.ratio, comparison.low, comparison.high, _word(comparison))
        for name, comparison in measured.comparisons.items()
    ]
    return replacing(timings, rounds=len(measured.twin), seconds=rule.budget, cancelled=measured.ended == "cancelled")


def replacing(candidates: list[KernelTiming], *, rounds: int, seconds: float, cancelled: bool = False) -> Replacement:
    """Return the candidates with the one that is to run first: the fastest of those that are faster, or the control."""
    rank = {"faster": 0, "control": 1}
    order = sorted(
        candidates,
        key=lambda candidate: (
            rank.get(candidate.verdict, 2),
            candidate.ratio if candidate.verdict == "faster" else candidate.microseconds,
        ),
    )
    undecided = order[0].verdict == "control" and any(timing.verdict == "inconclusive" for timing in order)
    return Replacement(tuple(order), rounds, seconds, undecided, cancelled)


def alike(replacement: Replacement, rule: TuningPolicy) -> list[KernelTiming]:
    """Return the candidates whose memory may decide: those that surely take about as long as the first, or all."""
    if rule.objective == "memory":
        return list(replacement.candidates)
    most = replacement.chosen.ratio * (1 + rule.min_effect)
    return [
        candidate
        for candidate in replacement.candidates
        if candidate is replacement.chosen or (candidate.verdict != "control" and candidate.high <= most)
    ]


def by_memory(replacement: Replacement, peaks: Mapping[str, int], rule: TuningPolicy) -> Replacement:
    """Return what was measured, with the bytes that kernels hold at most, and the one first that is to run by these."""
    rows = [candidate._replace(peak_bytes=peaks.get(candidate.kernel) or None) for candidate in replacement.candidates]
    known = [
        (row.peak_bytes, row) for row in alike(replacement._replace(candidates=tuple(rows)), rule) if row.peak_bytes
    ]
    if not known:
        return replacement
    most = min(peak for peak, _ in known) / (1 - rule.min_effect)
    chosen = next(row for peak, row in known if peak <= most)
    if rows[0].peak_bytes is None or chosen is rows[0]:
        return replacement._replace(candidates=tuple(rows))
    return replacement._replace(candidates=(chosen, *(row for row in rows if row is not chosen)), undecided=False)


def _settled(comparisons: Mapping[str, RatioComparison]) -> bool:
    return all(
        comparison.verdict is RatioVerdict.FASTER or comparison.not_faster for comparison in comparisons.values()
    )


def _word(comparison: RatioComparison) -> str:
    if comparison.verdict is RatioVerdict.INCONCLUSIVE and comparison.not_faster:
        return "not_faster"
    return comparison.verdict.value
