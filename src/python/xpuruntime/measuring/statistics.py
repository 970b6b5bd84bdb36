# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Statistics of measurements: quantiles, ratios with intervals, margins, and names of candidates."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from xpuruntime.codes import Code
from xpuruntime.errors import InputError

#: Share by which something must be faster to be taken in place of what would run without a search.
LEAST_GAIN = 0.02
#: Resamples of one interval, and how much later each look is than the one before.
_RESAMPLES, _GROWTH = 2000, 4 / 3


class RatioVerdict(enum.StrEnum):
    """What is known of the ratio: above the margin, below it, inside of it on both sides, or nothing yet."""

    FASTER = "faster"
    SLOWER = "slower"
    TIED = "tied"
    INCONCLUSIVE = "inconclusive"


class Margin(NamedTuple):
    """The smallest difference that counts: a share of the control's time, and at least so many seconds."""

    relative: float = 0.05
    absolute: float = 2e-6

    def of(self, control: float) -> float:
        """Return the margin beside one control as a share of its seconds."""
        return max(self.relative, self.absolute / control)


class Interval(NamedTuple):
    """A ratio and the ends of its interval."""

    ratio: float
    low: float
    high: float


class RatioComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A thing compared with a control."""

    ratio: float
    low: float
    high: float
    confidence: float
    margin: float
    rounds: int
    looks: int
    family: int
    verdict: RatioVerdict
    within_limit: bool
    not_faster: bool
    too_noisy: bool
    control_split: Interval | None
    p_slower: float
    p_within_limit: float


def paired_ratio(
    times: Sequence[float], control: Sequence[float], *, confidence: float = 0.99, seed: int = 0
) -> Interval:
    """Return the median ratio of times that were measured in the same rounds, with a bootstrap interval.

    Rounds are drawn with replacement, with the same seed each time, so that the same times give the same interval.
    """
    return _interval(_log_ratios(times, control), confidence, seed)


def compare(
    times: Sequence[float],
    control: Sequence[float],
    *,
    twin: Sequence[float] | None = None,
    margin: Margin | None = None,
    confidence: float = 0.99,
    looks: int = 1,
    family: int = 1,
    seed: int = 0,
    widen: bool = False,
) -> RatioComparison:
    """Decide whether times are above or below those of a control."""
    margin = margin or Margin()
    logs = _log_ratios(times, control)
    share = margin.of(float(np.median(control)))
    split: Interval | None = None
    too_noisy, bias = False, 0.0
    if twin is not None:
        again = _log_ratios(twin, control)
        logs = logs - again / 2
        split = _interval(again, confidence, seed)
        apart = abs(float(np.median(again)))
        if too_noisy := 2 * apart > math.log1p(share):
            bias = apart
    same = math.log1p(share) - bias
    beyond = max(math.log1p(share), 2 * bias) if widen else math.log1p(share) + bias
    if widen:
        share = math.expm1(beyond)
    level = (1 - confidence) / family
    above, below = sign_test(logs > beyond, looks), sign_test(logs < same, looks)
    over, under = sign_test(logs > -same, looks), sign_test(logs < -beyond, looks)
    interval = _interval(logs, confidence, seed)
    low, high = math.log(interval.low), math.log(interval.high)
    slower = above <= level and low > beyond
    within = below <= level and high < same
    not_faster = over <= level and low > -same
    verdict = RatioVerdict.INCONCLUSIVE
    if slower:
        verdict = RatioVerdict.SLOWER
    elif under <= level and high < -beyond:
        verdict = RatioVerdict.FASTER
    elif within and not_faster:
        verdict = RatioVerdict.TIED
    return RatioComparison(
        ratio=interval.ratio, low=interval.low, high=interval.high, confidence=confidence, margin=share,
        rounds=len(logs), looks=looks, family=family, verdict=verdict, within_limit=within, not_faster=not_faster,
        too_noisy=too_noisy, control_split=split, p_slower=above, p_within_limit=below,
    )  # fmt: skip


def look_rounds(first: int, last: int, *, most: int = 0, confidence: float = 0.99, family: int = 1) -> tuple[int, ...]:
    """Return after how many rounds data are looked at: each time a third more, and after `last` twice as many.

    None comes before the sign test can decide at all: with fewer rounds even unanimous ones have too large a p-value.
    One look more, at whatever round the budget ends, is allowed for. No look is after `most` rounds, or after `last`
    where that is more.
    """
    previous: list[int] = []
    while True:
        looks = growing_rounds(max(first, len(previous) and _least(len(previous) + 1, confidence, family)), last)
        while looks[-1] < most:
            looks.append(min(2 * looks[-1], most))
        if len(looks) <= len(previous) or looks == previous:
            return tuple(looks)
        previous = looks


def median_interval(values: Sequence[float], *, confidence: float = 0.99) -> Interval | None:
    """Return the median and its interval by order statistics; ``None`` of fewer values than that can be said of."""
    ordered, number = np.sort(values), len(values)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(number) / 2
    below, above = math.floor(number / 2 - reach), math.ceil(number / 2 + reach)
    if below < 0 or above >= number:
        return None
    return Interval(float(np.median(ordered)), float(ordered[below]), float(ordered[above]))


def sign_test(agree: np.ndarray, looks: int = 1) -> float:
    """Return the chance of so many agreeing rounds, or more, if each agreed with probability 1/2, times `looks`."""
    rounds, count = len(agree), int(np.count_nonzero(agree))
    tail: float = sum(math.comb(rounds, k) for k in range(count, rounds + 1)) / 2**rounds
    return min(1.0, looks * tail)


def holm(p_values: Sequence[float], *, confidence: float = 0.99) -> list[bool]:
    """Return which hypotheses are rejected so that any false rejection has at most the chance ``1 - confidence``."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = [False] * len(p_values)
    for position, index in enumerate(order):
        if p_values[index] > (1 - confidence) / (len(order) - position):
            break
        rejected[index] = True
    return rejected


def runs_required(quantile: float, *, beyond: int = 1, confidence: float = 0.99) -> int:
    """Return how many runs show that a quantile is within a bound, of which `beyond` runs are over it.

    As in MLPerf's rules: if less than that share of all runs were within the bound, so few runs beyond it would have
    at most the chance ``1 - confidence``.
    """
    if not 0 < quantile < 1:
        msg = f"a quantile is between 0 and 1, not {quantile!r}"
        raise InputError(msg)

    def chance(runs: int) -> float:
        return math.fsum(math.comb(runs, k) * (1 - quantile) ** k * quantile ** (runs - k) for k in range(beyond + 1))

    low, high = 0, 1
    while chance(high) > 1 - confidence:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chance(middle) > 1 - confidence else (low, middle)
    return high


def require_runs(quantile: float, runs: int, *, confidence: float = 0.99) -> None:
    """Refuse a claim about a quantile that so few runs cannot support."""
    needed = runs_required(quantile, confidence=confidence)
    if runs < needed:
        msg = (
            f"nothing can be claimed of p{quantile * 100:g} from {runs} runs: {needed} are needed at a confidence of "
            f"{confidence:.0%}; measure more runs, or claim p50"
        )
        raise InputError(msg)


def _log_ratios(times: Sequence[float], control: Sequence[float]) -> np.ndarray:
    if len(times) != len(control) or not len(times):
        msg = f"paired times come from the same rounds, not from {len(times)} and {len(control)}"
        raise InputError(msg)
    above, below = np.asarray(times, dtype=float), np.asarray(control, dtype=float)
    if not (np.isfinite(above).all() and np.isfinite(below).all() and (above > 0).all() and (below > 0).all()):
        msg = "times must be finite and above zero: a round of fewer calls than the clock can resolve has none"
        raise InputError(msg)
    logs: np.ndarray = np.log(above) - np.log(below)
    return logs


def _interval(logs: np.ndarray, confidence: float, seed: int) -> Interval:
    """Return the median and its percentile interval over resamples."""
    # Of a resample only the ranks of its middle rounds matter. They are drawn directly: the k-th smallest of n uniform
    # numbers has the beta distribution of k and n - k + 1, and the next one is the least of those that are left.
    random, rounds = np.random.default_rng(seed), len(logs)
    ordered, k = np.sort(logs), (rounds + 1) // 2
    quantiles = random.beta(k, rounds - k + 1, _RESAMPLES)
    medians = ordered[np.minimum(quantiles * rounds, rounds - 1).astype(np.intp)]
    if rounds % 2 == 0:
        quantiles += (1 - quantiles) * random.beta(1, rounds - k, _RESAMPLES)
        medians = (medians + ordered[np.minimum(quantiles * rounds, rounds - 1).astype(np.intp)]) / 2
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(math.exp(float(np.median(logs))), math.exp(low), math.exp(high))


def growing_rounds(first: int, last: int) -> list[int]:
    """Return numbers of rounds from the first to the last, each a third more than the one before."""
    looks = [min(first, last)]
    while looks[-1] < last:
        later = math.ceil(looks[-1] * _GROWTH)
        looks.append(later if later * 1.1 < last else last)
    return looks


def _least(looks: int, confidence: float, family: int) -> int:
    return math.ceil(math.log2(looks * family / (1 - confidence)))


class CandidateCode(Code):
    """Why a candidate of a search won, or did not: of policies, and of variants of a training step."""

    WINNER = "winner", "It is the best of those that keep the constraints."
    CONTROL = "control", "It is what was there before the search, which all are compared with."
    UNDECIDED = "undecided", "The budget ended before it was decided whether it is faster."
    BEATEN = "beaten", "It is faster than the control, and the winner is faster still."
    NOT_FASTER = "not_faster", "It is not faster by the least effect that counts."
    SLOWER = "slower", "It is slower than what it was compared with."
    INFEASIBLE = "infeasible", "It cannot run here: the plan rejects it, or an obstacle is known beforehand."
    DUPLICATE = "duplicate", "The engine gets for it what it gets for another candidate."
    OPEN_FAILED = "open_failed", "It could not be opened."
    RUN_FAILED = "run_failed", "It was opened, and a run of it failed."
    FAILED = "failed", "It raised an error that is none of xpuruntime's."
    CRASHED = "crashed", "Its process ended while it was opened or run."
    TIMEOUT = "timeout", "It gave no result within the time allowed."
    INACCURATE = "inaccurate", "Its results are too far from the reference."
    MEMORY = "memory", "It needs more memory than is allowed, or than there is."
    SLOW_START = "slow_start", "Its first result took longer than is allowed."
    LATENCY = "latency", "Its tail latency is longer than is allowed."
    NONDETERMINISTIC = "nondeterministic", "Its results do not repeat in the grade asked for."
    NODE_LOST = "node_lost", "The computer that it was measured on was lost, and so was another one."
    NOT_TRIED = "not_tried", "The budget had no room for it."
