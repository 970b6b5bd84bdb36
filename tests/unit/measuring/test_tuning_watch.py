# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`watch_tuning`: progress, cancelling and one budget for all tuning, also in the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.measuring.tuning_watch import TuningProgress, TuningStep, watch_tuning

FASTEST = xrt.KernelPolicy(auto_strategy="best_performance")


@pytest.fixture(autouse=True)
def nothing_is_measured() -> Any:
    from xpuruntime.ops.call_context import prepare
    from xpuruntime.ops.tuning_cache import use_tuning_cache

    prepare()
    dispatcher = _core.Dispatcher.instance()
    dispatcher.set_tuning_store(None)
    dispatcher.forget_measurements()
    xrt.clear_decisions()
    yield
    use_tuning_cache()


def product(rows: int) -> Any:
    x = np.ones((rows, 16), np.float32)
    policy = xrt.Policy(kernels=FASTEST)
    xrt.ops.matmul(x, np.ones((16, 16), np.float32), policy=policy)
    return xrt.decisions()[-1]


@pytest.mark.timed
def test_progress_of_the_core() -> None:
    seen: list[TuningProgress] = []
    with watch_tuning(progress=seen.append) as watch:
        decision = product(3)
    assert decision.source == "tuned"
    assert {(one.tuner, one.operation) for one in seen} == {("core", "matmul")}
    assert [(one.rounds, one.most_rounds) for one in seen] == [
        (0, 0), *((number, 61) for number in range(len(seen) - 1))
    ]  # fmt: skip
    assert all(one.candidates >= 2 for one in seen)
    assert 0 < seen[-1].seconds <= seen[-1].total == watch.seconds
    count = len(seen)
    product(5)
    assert len(seen) == count, "the block is left"


def test_what_is_cancelled_is_measured_at_the_next_call() -> None:
    with watch_tuning(cancel=lambda: True):
        decision = product(7)
        assert decision.source == "first"
        assert any("cancelled" in note for note in decision.notes)
    assert product(7).source == "tuned"


def test_one_budget_for_all_operations() -> None:
    with watch_tuning(budget=1e-9):
        assert [product(rows).source for rows in (9, 10)] == ["first", "first"]


def test_the_innermost_block_counts() -> None:
    outer: list[TuningProgress] = []
    with watch_tuning(progress=outer.append), watch_tuning(cancel=lambda: True):
        product(11)
    assert not outer


def test_a_watch_that_raises_ends_tuning_and_is_told() -> None:
    def bad(_: TuningProgress) -> None:
        raise ValueError("no more")

    with watch_tuning(progress=bad):
        with pytest.warns(XpuRuntimeWarning, match="ValueError: no more"):
            assert product(13).source == "first"
        assert product(14).source == "first", "and it is not told again"


def test_an_interruption_goes_through() -> None:
    def stop(_: TuningProgress) -> None:
        raise KeyboardInterrupt

    step = TuningStep("torch", "x")
    with watch_tuning(progress=stop), pytest.raises(KeyboardInterrupt):
        step(2, 0, 61, 0.0)

    def call() -> None:
        product(15)
        for _ in range(1000):  # as soon as Python goes on
            pass

    with watch_tuning(progress=stop), pytest.raises(KeyboardInterrupt):
        call()


@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_a_budget_of_nothing_is_refused(budget: float) -> None:
    with pytest.raises(InputError, match="Fix: give positive seconds"):
        watch_tuning(budget=budget)


def test_the_policy_bounds_one_operation() -> None:
    kernels = FASTEST.replace(tuning={"budget": "1ms"})
    seen: list[TuningProgress] = []
    x = np.ones((512, 512), np.float32)
    with watch_tuning(progress=seen.append):
        xrt.ops.matmul(x, x, policy=xrt.Policy(kernels=kernels))
    assert [one.rounds for one in seen] == [0, 0], "a round of this takes longer"
    decision = xrt.decisions()[-1]
    (other,) = (
        candidate for candidate in decision.candidates if candidate.measured_us and candidate.id != decision.chosen
    )
    assert "not decided" in other.reason
