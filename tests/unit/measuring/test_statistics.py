# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Paired statistics: error rates by simulation on heavy-tailed noise, and values from other sources."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from sampled import ALL
from scipy import stats

from xpuruntime.errors import InputError
from xpuruntime.measuring.statistics import (
    Margin,
    RatioVerdict,
    compare,
    holm,
    look_rounds,
    paired_ratio,
    require_runs,
    runs_required,
    sign_test,
)

ONLY_RELATIVE = Margin(0.05, 0.0)
LOOKS = look_rounds(9, 121)
#: A tenth of the simulations of a claim, so that one in 100 can be counted.
TRIES = 100 if ALL else 30


def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Log-times as medians of blocks are on a busy machine of two processors: mostly quiet, one in six far out."""
    quiet = rng.normal(0, 0.012, shape)
    far = rng.laplace(0, 0.2, shape)
    return np.where(rng.random(shape) < 1 / 6, far, quiet)


def rounds_of(rng: np.random.Generator, count: int, effect: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return times, control and twin of rounds, which drift together by a random walk."""
    log = noise(rng, (3, count)) + np.cumsum(rng.normal(0, 0.05, count))
    log[0] += math.log1p(effect)
    times, control, twin = np.exp(log) * 1e-3
    return times, control, twin


def verify(rng, effect, *, margin=ONLY_RELATIVE, looks=LOOKS, family=1):
    times, control, twin = rounds_of(rng, looks[-1], effect)
    for count in looks:
        verification = compare(
            times[:count], control[:count], twin=twin[:count], margin=margin, looks=len(looks) + 1, family=family
        )
        if verification.verdict is not RatioVerdict.INCONCLUSIVE:
            break
    return verification


def predicted_share(chance: float, looks: tuple[int, ...], level: float = 0.01) -> float:
    """Return the chance that a sign test rejects at one of the looks, by the exact distribution of the count."""
    counts, left, shares = np.array([1.0]), 0.0, 0
    for count in looks:
        counts = np.convolve(counts, stats.binom.pmf(np.arange(count - shares + 1), count - shares, chance))
        shares = count
        needed = next(k for k in range(count + 2) if (len(looks) + 1) * stats.binom.sf(k - 1, count, 0.5) <= level)
        left += counts[needed:].sum()
        counts[needed:] = 0
    return left


def test_no_more_than_one_in_a_hundred_unchanged_things_is_called_slower_or_faster():
    rng = np.random.default_rng(20)
    verdicts = Counter(verify(rng, 0.0).verdict for _ in range(10 * TRIES))
    assert verdicts[RatioVerdict.SLOWER] + verdicts[RatioVerdict.FASTER] <= TRIES // 10, verdicts
    assert verdicts[RatioVerdict.TIED] >= 9.9 * TRIES, "and it says so, instead of leaving all undecided"


def test_family_wise_error_rate_of_unchanged_claims_is_one_percent():
    rng = np.random.default_rng(21)
    looks = look_rounds(9, 61, family=5)
    wrong = sum(
        any(verify(rng, 0.0, looks=looks, family=5).verdict in {"slower", "faster"} for _ in range(5))
        for _ in range(60 if ALL else 20)
    )
    assert wrong <= 1


def test_a_change_as_large_as_the_margin_is_the_worst_case_and_still_bounded():
    """The null hypothesis of the sign test exactly: here, and nowhere else, its error rate is used up."""
    rng = np.random.default_rng(22)
    verdicts = Counter(verify(rng, 0.05).verdict for _ in range(3 * TRIES))
    assert verdicts[RatioVerdict.SLOWER] <= 9 * TRIES // 100, verdicts


@pytest.mark.parametrize(("effect", "expected"), [(0.10, "slower"), (-0.10, "faster")])
def test_a_planted_tenth_is_found(effect, expected):
    rng = np.random.default_rng(23)
    verdicts = Counter(verify(rng, effect).verdict for _ in range(TRIES))
    assert verdicts[RatioVerdict(expected)] >= 0.99 * TRIES, verdicts


@pytest.mark.parametrize("margin", [0.035, 0.04])
def test_a_planted_twentieth_is_found_as_often_as_the_method_predicts(margin):
    rng, looks = np.random.default_rng(24), look_rounds(9, 121)
    times, control, twin = rounds_of(rng, 400_000, 0.05)
    logs = np.log(times) - (np.log(control) + np.log(twin)) / 2
    expected = predicted_share(float((logs > math.log1p(margin)).mean()), looks)
    tries = 3 * TRIES
    total = sum(verify(rng, 0.05, margin=Margin(margin, 0.0)).verdict == "slower" for _ in range(tries)) / tries
    assert expected > 0.1
    assert abs(total - expected) < 3 * math.sqrt(expected * (1 - expected) / tries) + 0.03, (total, expected)


def test_looking_often_without_accounting_for_it_would_be_found_out():
    """The simulation can fail: ten looks at the level of one reject a true hypothesis too often."""
    rng, looks, wrong = np.random.default_rng(25), look_rounds(9, 121), 0
    for _ in range(3000):
        agree = rng.random(looks[-1]) < 0.5
        wrong += any(sign_test(agree[:count]) <= 0.01 for count in looks)
    assert wrong / 3000 > 0.02
    held = sum(
        any(sign_test(agree[:count], len(looks) + 1) <= 0.01 for count in looks)
        for agree in (rng.random(looks[-1]) < 0.5 for _ in range(3000))
    )
    assert held / 3000 <= 0.01


@pytest.mark.parametrize(
    ("planted", "quiet", "noisy"),
    [(0.09, "slower", "inconclusive"), (0.30, "slower", "slower"), (0.04, "inconclusive", "inconclusive"),
     (-0.08, "faster", "inconclusive"), (-0.30, "faster", "faster")],
)  # fmt: skip
def test_a_control_that_differs_from_itself_decides_only_what_is_farther_off(planted, quiet, noisy):
    rng = np.random.default_rng(1)
    times, control, twin = rounds_of(rng, 61, planted)
    assert compare(times, control, twin=twin, margin=ONLY_RELATIVE).verdict == quiet
    comparison = compare(times, control, twin=twin * 1.06, margin=ONLY_RELATIVE)
    assert comparison.too_noisy
    assert comparison.verdict == noisy
    comparison = compare(times, control, twin=twin * 1.03, margin=ONLY_RELATIVE)
    assert comparison.too_noisy
    assert comparison.control_split is not None
    assert comparison.control_split.low < 1.03 < comparison.control_split.high


def test_microseconds_below_the_absolute_margin_do_not_count():
    rng = np.random.default_rng(2)
    times, control, twin = (seconds / 100 for seconds in rounds_of(rng, 61, 0.15))  # of 10 us, 1.5
    steady = control / np.median(control) * 1e-5
    comparison = compare(times / control * steady, steady, twin=twin / control * steady)
    assert comparison.margin == pytest.approx(0.2, rel=0.01)
    assert comparison.verdict == "tied"
    assert compare(times, control, twin=twin, margin=ONLY_RELATIVE).verdict == "slower"


def test_with_too_few_rounds_nothing_is_decided():
    control = np.linspace(1, 1.1, 9)
    assert compare(control * 2, control, looks=1).verdict == "slower"
    assert compare(control * 2, control, looks=10).verdict == "inconclusive"
    assert look_rounds(9, 121)[0] > 9
    assert look_rounds(9, 121, family=20)[0] > look_rounds(9, 121)[0]
    assert look_rounds(9, 9) == (9,)


def test_the_interval_is_that_of_the_plain_bootstrap_and_is_repeatable():
    rng = np.random.default_rng(3)
    for count in (30, 31):
        times, control, _ = rounds_of(rng, count, 0.2)
        ratio = paired_ratio(times, control, confidence=0.95)
        assert ratio == paired_ratio(times, control, confidence=0.95)
        assert ratio.ratio == pytest.approx(np.exp(np.median(np.log(times / control))))
        plain = stats.bootstrap(
            (np.log(times / control),), np.median, confidence_level=0.95, n_resamples=5000, method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        assert ratio.low == pytest.approx(np.exp(plain.low), rel=0.006)
        assert ratio.high == pytest.approx(np.exp(plain.high), rel=0.006)


def test_sign_test_is_the_binomial_test():
    rng = np.random.default_rng(4)
    for count in (5, 40, 300):
        agree = rng.random(count) < 0.6
        expected = stats.binomtest(int(agree.sum()), count, alternative="greater").pvalue
        assert sign_test(agree) == pytest.approx(expected)
        assert sign_test(agree, looks=7) == pytest.approx(min(1.0, 7 * expected))


def test_holm_on_the_example_of_the_literature():
    """Adjusted p-values of 0.01, 0.04, 0.03, 0.005 are 0.03, 0.06, 0.06, 0.02."""
    assert holm([0.01, 0.04, 0.03, 0.005], confidence=0.95) == [True, False, False, True]
    assert holm([0.01, 0.02, 0.02, 0.005], confidence=0.95) == [True, True, True, True]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("quantile", "beyond", "runs"),
    [(0.9, 0, 44), (0.9, 1, 64), (0.95, 0, 90), (0.95, 1, 130), (0.99, 0, 459), (0.99, 1, 662), (0.999, 0, 4603)],
)
def test_runs_that_a_quantile_needs_are_those_of_mlperf(quantile, beyond, runs):
    assert runs_required(quantile, beyond=beyond) == runs


def test_a_p99_of_too_few_runs_is_refused():
    require_runs(0.99, 662)
    with pytest.raises(InputError, match=r"nothing can be claimed of p99 from 661 runs: 662 are needed"):
        require_runs(0.99, 661)


@pytest.mark.parametrize("bad", [[0.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [-1.0, 1.0], [1.0], []])
def test_times_that_are_none_are_refused(bad):
    with pytest.raises(InputError):
        compare(bad, [1.0, 1.0] if bad else [])
