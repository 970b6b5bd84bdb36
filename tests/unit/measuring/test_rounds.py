# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interleaved rounds: order, stops, and real differences in this process and in workers."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from xpuruntime.errors import InputError
from xpuruntime.measuring.rounds import in_worker, measure, time_calls, timed
from xpuruntime.measuring.statistics import Margin
from xpuruntime.runtime.worker import Worker, WorkerFailure

FUNCTIONS = Path(__file__).parents[1] / "runtime"


class Recorded:
    """A variant of a known time that notes when it ran."""

    def __init__(self, name: str, log: list[str], seconds: float) -> None:
        self.name, self.log, self.seconds = name, log, seconds
        self.random = np.random.default_rng(len(name) + len(log))

    def __call__(self, calls: int, samples: int) -> list[float]:
        self.log.append(self.name)
        return [calls * self.seconds * float(np.exp(self.random.normal(0, 0.01))) for _ in range(samples)]


def recorded(log: list[str], **seconds: float) -> dict[str, Recorded]:
    return {name: Recorded(name, log, value) for name, value in seconds.items()}


def test_every_round_has_every_variant_and_each_place_is_everyones():
    log: list[str] = []
    variants = recorded(log, a=1e-3, b=1e-3, c=1e-3)
    measurement = measure(variants, control="a", warm=0.0, rounds=(24, 24), settled=lambda _: False)
    turns = log[-24 * 4 :]
    rounds = [turns[k : k + 4] for k in range(0, len(turns), 4)]
    assert all(sorted(one) == ["a", "a", "b", "c"] for one in rounds)
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True)), "ABBA"
    for name in "bc":
        places = [sum(turn[index] == name for turn in rounds) for index in range(4)]
        assert places == [6, 6, 6, 6]
    assert {len(times) for times in measurement.rounds.values()} == {24}
    assert measurement.ended == "rounds"


def test_it_stops_when_decided_and_tells_progress():
    seen = []
    measurement = measure(recorded([], a=1e-3, b=1.3e-3, c=1e-3), control="a", warm=0.0, progress=seen.append)
    assert measurement.ended == "decided"
    assert (measurement.comparisons["b"].verdict, measurement.comparisons["c"].verdict) == ("slower", "tied")
    assert measurement.comparisons["b"].ratio == pytest.approx(1.3, rel=0.02)
    assert seen[-1].rounds == len(measurement.twin) < seen[-1].most_rounds
    assert not measurement.comparisons["b"].too_noisy
    assert measurement.conditions.seconds > 0


@pytest.mark.parametrize(("b", "verdict"), [(1e-5, "tied"), (1.3e-5, "slower"), (0.7e-5, "faster")])
def test_a_ratio_that_is_expected_is_no_difference_and_blocks_stay_as_long(b, verdict):
    variants = recorded([], a=1e-3, b=b)
    sizes = []
    control = variants["a"]
    variants["a"] = lambda calls, samples: sizes.append(calls * samples) or control(calls, samples)
    measurement = measure(variants, control="a", warm=0.0, expected=0.01)
    assert measurement.comparisons["b"].verdict == verdict
    assert measurement.comparisons["b"].ratio == pytest.approx(b / 1e-5, rel=0.02)
    assert max(sizes) <= 25, "a block of 20 ms has 20 calls of 1 ms, whatever ratio is expected"


def test_it_stops_at_the_budget_and_when_cancelled_with_what_there_is():
    log: list[str] = []
    measurement = measure(recorded(log, a=1e-3, b=1.06e-3), control="a", warm=0.0, budget=0.0)
    assert measurement.ended == "budget"
    assert measurement.comparisons["b"].verdict == "inconclusive"
    assert len(measurement.twin) == 1
    log.clear()
    measurement = measure(recorded(log, a=1e-3, b=1e-3), control="a", warm=0.0, cancel=lambda: len(log) > 20)
    assert measurement.ended == "cancelled"
    assert {len(measurement.rounds["a"]), len(measurement.rounds["b"])} == {len(measurement.twin)}, (
        "no half of a round is kept"
    )
    assert measure(recorded([], a=1e-3, b=1e-3), control="a", cancel=lambda: True).comparisons == {}


def test_what_was_decided_to_be_slower_is_timed_no_more():
    log: list[str] = []
    variants = recorded(log, a=1e-3, b=1.01e-3, c=3e-3)
    margin = Margin(0.02, 0.0)
    measurement = measure(variants, control="a", warm=0.0, rounds=(9, 40), margin=margin, settled=lambda _: False,
                    drop_slower=True)  # fmt: skip
    assert measurement.comparisons["c"].verdict == "slower"
    assert (
        measurement.comparisons["c"].rounds
        == len(measurement.rounds["c"])
        < len(measurement.rounds["b"])
        == len(measurement.twin)
    )
    assert measurement.comparisons["b"].rounds == len(measurement.twin)


def test_a_block_is_as_long_as_asked_and_a_sample_longer_than_the_clock():
    calls = []

    def quick(count: int, samples: int) -> list[float]:
        calls.append((count, samples))
        return [count * 1e-7] * samples

    measure({"a": quick, "b": quick}, control="a", warm=0.0, rounds=(1, 1), block=0.02)
    count, samples = calls[-1]
    assert count * 1e-7 >= 20e-6
    assert count * samples * 1e-7 >= 0.02


def test_the_median_of_a_block_leaves_out_interrupted_calls():
    """One call in five takes ten times as long: the mean nearly triples."""

    def disturbed(calls: int, samples: int) -> list[float]:
        return [calls * 1e-3 * (10 if k % 5 == 4 else 1) for k in range(samples)]

    def quiet(calls: int, samples: int) -> list[float]:
        return [calls * 1e-3] * samples

    def ratio(statistic):
        measurement = measure({"a": quiet, "b": disturbed}, control="a", warm=0.0, rounds=(20, 20), statistic=statistic)
        return measurement.comparisons["b"].ratio

    assert ratio("median") == 1
    assert ratio("mean") == pytest.approx(2.8, rel=0.02)


def work(size: int):
    return lambda: sum(range(size))


def test_real_work_of_this_process_is_compared():
    """On a machine that is too busy it may stay undecided; it is never decided wrongly."""
    variants = {"one": timed(work(3000)), "same": timed(work(3000)), "twice": timed(work(6000))}
    measurement = measure(variants, control="one", margin=Margin(0.2), budget=20)
    assert measurement.comparisons["same"].verdict in {"tied", "inconclusive"}, measurement
    assert measurement.comparisons["twice"].verdict in {"slower", "inconclusive"}, measurement
    assert measurement.comparisons["twice"].ratio > 1.4, measurement


def test_variants_of_workers_are_timed_inside_of_them():
    with Worker(pythonpath=[FUNCTIONS]) as worker, Worker(pythonpath=[FUNCTIONS]) as other:
        measurement = measure(
            {
                "one": in_worker(worker, "worker_functions:samples_of_work", size=3000),
                "other": in_worker(other, "worker_functions:samples_of_work", size=6000),
            },
            control="one", margin=Margin(0.2), budget=20,
        )  # fmt: skip
        assert measurement.comparisons["other"].verdict in {"slower", "inconclusive"}, measurement
        assert measurement.comparisons["other"].ratio > 1.4, measurement
        # A call there and back takes far longer than the work, and is no part of it.
        assert statistics.median(measurement.rounds["one"]) < 3e-4


def test_a_worker_that_dies_in_a_round_is_a_failure_with_a_name():
    with Worker(pythonpath=[FUNCTIONS]) as worker, Worker(pythonpath=[FUNCTIONS]) as other:
        dies = in_worker(other, "worker_functions:dies_later", after=5)
        with pytest.raises(WorkerFailure, match="SIGSEGV"):
            measure(
                {"one": in_worker(worker, "worker_functions:samples_of_work", size=10), "other": dies}, control="one"
            )


def test_a_control_that_is_no_variant_is_refused():
    with pytest.raises(InputError, match="nothing to compare 'c' with"):
        measure(recorded([], a=1.0, b=1.0), control="c")
    with pytest.raises(InputError, match="nothing to compare 'a' with"):
        measure(recorded([], a=1.0), control="a")


def test_finish_is_inside_the_time_of_every_sample():
    ends = []
    times = time_calls(lambda: None, 4, 3, lambda: (ends.append(1), time.sleep(0.002)))
    assert len(ends) == 3
    assert all(seconds >= 0.002 for seconds in times)
