# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which kernel replaces another: the protocol of the tuners in Python, and that of the core's, which is the same."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sampled import ALL

from xpuruntime import _core
from xpuruntime.measuring.rounds import ROUNDS, KernelTiming, by_memory, choose, replacing
from xpuruntime.measuring.statistics import Margin, compare, look_rounds
from xpuruntime.policies import TuningPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def taking(seconds: float, noise: float = 0.0, seed: int = 0) -> Callable[[int, int], Sequence[float]]:
    """Return a sampler of calls that take so long, with noise of a share."""
    random = np.random.default_rng(seed)
    return lambda calls, samples: [seconds * calls * math.exp(noise * random.standard_normal()) for _ in range(samples)]


def chosen(rule: TuningPolicy | None = None, noise: float = 0.0, **seconds: float) -> tuple[str, bool]:
    variants = {name: taking(one, noise, seed) for seed, (name, one) in enumerate(seconds.items())}
    choice = choose(variants, control="native", rule=rule or TuningPolicy())
    return choice.chosen.kernel, choice.undecided


def test_the_fastest_of_those_that_are_faster_replaces() -> None:
    assert chosen(native=1e-3, a=0.9e-3, b=0.7e-3, c=1.2e-3) == ("b", False)


def test_what_gains_no_more_than_the_margin_replaces_nothing() -> None:
    assert chosen(native=1e-3, ours=0.99e-3) == ("native", False)
    assert chosen(TuningPolicy(min_effect=0.005), native=1e-3, ours=0.99e-3) == ("ours", False)
    assert chosen(TuningPolicy(min_effect="40%"), native=1e-3, ours=0.8e-3) == ("native", False)


def test_at_the_margin_it_is_undecided_and_the_control_stays() -> None:
    choices = [
        choose({"native": taking(1e-3, 0.01, seed), "ours": taking(1e-3 / 1.02, 0.01, seed + 1000)}, control="native",
               rule=TuningPolicy(), block=1e-9)
        for seed in range(50 if ALL else 20)
    ]  # fmt: skip
    assert sum(choice.undecided and choice.chosen.kernel == "native" for choice in choices) >= 0.9 * len(choices)


def test_the_candidates_are_in_the_order_in_which_they_may_run() -> None:
    variants = {"native": taking(1e-3), "a": taking(0.9e-3), "b": taking(0.7e-3), "c": taking(1.2e-3)}
    choice = choose(variants, control="native", rule=TuningPolicy())
    assert [(candidate.kernel, candidate.verdict) for candidate in choice.candidates] == [
        ("b", "faster"), ("a", "faster"), ("native", "control"), ("c", "slower"),
    ]  # fmt: skip
    assert choice.candidates[0].ratio == pytest.approx(0.7)
    assert choice.candidates[0].microseconds == pytest.approx(700)
    assert choice.rounds < ROUNDS[1], "the rest of the rounds is not needed"


def test_equal_kernels_rarely_replace_each_other() -> None:
    variants = (
        choose({"native": taking(1e-3, 0.05, seed), "ours": taking(1e-3, 0.05, seed + 1000)}, control="native",
               rule=TuningPolicy(min_effect=0.0), block=1e-9)
        for seed in range(100 if ALL else 40)
    )  # fmt: skip
    assert sum(variant.chosen.kernel == "ours" for variant in variants) <= (4 if ALL else 2), "1 % of them, and chance"


def test_a_large_gain_shows_on_a_noisy_machine_where_two_turns_of_the_control_differ() -> None:
    control, twin = [1.0] * 11, [1.1] * 11
    for seconds, verdict in ((0.5, "faster"), (0.95, "inconclusive"), (1.5, "slower")):
        comparison = compare([seconds] * 11, control, twin=twin, margin=Margin(0.02, 0.0), widen=True)
        assert comparison.verdict.value == verdict
        assert comparison.margin == pytest.approx(0.21)
        assert not comparison.not_faster or verdict == "slower", "noise never proves that nothing is gained"
        assert comparison.too_noisy
        assert compare([seconds] * 11, control, twin=twin, margin=Margin(0.02, 0.0)).too_noisy


def test_the_budget_ends_it_without_a_decision() -> None:
    def slow(calls: int, samples: int) -> list[float]:
        time.sleep(0.02)
        return [1e-3 * calls] * samples

    choice = choose({"native": slow, "ours": slow}, control="native", rule=TuningPolicy(budget="50ms"))
    assert choice.undecided
    assert choice.chosen.kernel == "native"
    assert choice.seconds == 0.05


def test_it_ends_before_the_round_that_is_refused() -> None:
    seen: list[tuple[int, int, int]] = []

    class Step:
        def __call__(self, candidates: int, rounds: int, most: int, seconds: float) -> bool:
            assert seconds >= 0
            seen.append((candidates, rounds, most))
            return rounds == 2

        def end(self, seconds: float) -> None:
            assert seconds > 0

    choice = choose({"native": taking(1e-3), "ours": taking(1e-3)}, control="native", rule=TuningPolicy(), step=Step())  # type: ignore[arg-type]
    assert choice.cancelled
    assert seen == [(2, 0, 61), (2, 1, 61), (2, 2, 61)]


def test_one_kernel_needs_no_rounds() -> None:
    choice = choose({"native": taking(2e-6)}, control="native", rule=TuningPolicy())
    assert (choice.rounds, choice.chosen) == (0, KernelTiming("native", "", pytest.approx(2.0)))


def test_nothing_that_is_inconclusive_comes_first() -> None:
    found = replacing(
        [KernelTiming("native", "", 10.0), KernelTiming("ours", "", 5.0, 0.5, 0.2, 1.1, "inconclusive")],
        rounds=3,
        seconds=1.0,
    )
    assert found.chosen.kernel == "native"
    assert found.undecided


# The core decides the same


@pytest.mark.parametrize("seed", range(12))
def test_the_core_decides_as_python_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    rounds = int(random.integers(7, 62))
    true_ratio, noise = random.choice([0.7, 0.95, 0.98, 1.0, 1.02, 1.3]), random.choice([0.001, 0.01, 0.05])
    options = {"confidence": float(random.choice([0.9, 0.99])), "looks": int(random.integers(1, 9)),
               "family": int(random.integers(1, 5))}  # fmt: skip
    relative, absolute = float(random.choice([0.0, 0.02, 0.1])), float(random.choice([0.0, 3e-6]))

    def around(seconds: float) -> list[float]:
        return (seconds * np.exp(noise * random.standard_normal(rounds))).tolist()

    times, control, twin = around(1e-4 * true_ratio), around(1e-4), around(1e-4)
    expected = compare(times, control, twin=twin, margin=Margin(relative, absolute), widen=True, **options)
    found = _core.compare_paired(
        *([1e6 * time_ for time_ in times] for times in (times, control, twin)), relative=relative,
        absolute_us=absolute * 1e6, **options,
    )  # fmt: skip
    assert found["margin"] == pytest.approx(expected.margin)
    assert found["ratio"] == pytest.approx(expected.ratio)
    assert found["rounds"] == expected.rounds
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high), abs=3 * noise)
    assert (found["verdict"], found["not_faster"]) == (expected.verdict.value, expected.not_faster)


@pytest.mark.parametrize("family", [1, 2, 16, 100])
@pytest.mark.parametrize("confidence", [0.5, 0.99, 0.9999])
def test_the_core_looks_after_the_same_rounds(family: int, confidence: float) -> None:
    rounds = _core.look_rounds(*ROUNDS, confidence=confidence, family=family)
    assert tuple(rounds) == look_rounds(*ROUNDS, confidence=confidence, family=family)


@pytest.mark.parametrize(
    ("objective", "peaks", "chosen"),
    [
        ("time", {"own": 100, "faster": 100, "alike": 90, "slower": 10}, "alike"),
        ("time", {"own": 100, "faster": 100, "alike": 99, "slower": 10}, "faster"),  # less than the least effect
        ("time", {"own": 10, "faster": 100}, "faster"),
        ("time", {}, "faster"),
        ("memory", {"own": 100, "faster": 100, "alike": 90, "slower": 10}, "slower"),
        ("memory", {"own": 100, "faster": 11, "alike": 90, "slower": 10.9}, "faster"),
        ("memory", {"own": 10, "faster": 100, "alike": 90, "slower": 90}, "own"),
        ("memory", {}, "faster"),
    ],
)
def test_memory_decides_a_near_tie_or_where_it_is_the_objective(objective, peaks, chosen):
    timings = [
        KernelTiming("own", "", 100.0),
        KernelTiming("faster", "", 50.0, 0.5, 0.49, 0.505, "faster"),
        KernelTiming("alike", "", 50.5, 0.505, 0.5, 0.508, "faster"),
        KernelTiming("slower", "", 150.0, 1.5, 1.4, 1.6, "slower"),
    ]
    memory = by_memory(replacing(timings, rounds=9, seconds=1.0), peaks, TuningPolicy(objective=objective))
    assert memory.chosen.kernel == chosen
    assert sorted(candidate.kernel for candidate in memory.candidates) == ["alike", "faster", "own", "slower"]


def test_what_ties_with_the_control_may_replace_it_by_memory():
    timings = [KernelTiming("own", "", 100.0), KernelTiming("less", "", 101.0, 1.01, 1.0, 1.015, "tied")]
    for peak, chosen in ((50, "less"), (100, "own")):
        memory = by_memory(replacing(timings, rounds=9, seconds=1.0), {"own": 100, "less": peak}, TuningPolicy())
        assert memory.chosen.kernel == chosen
