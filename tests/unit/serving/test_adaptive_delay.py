# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The adaptive queue delay on a virtual clock: nobody waits for nobody, batches still fill, and a bound is a bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_simulation import closed_loop, execution_seconds, open_loop, poisson

from xpuruntime.serving.batching.scheduler import Entry, Scheduler
from xpuruntime.serving.batching.settings import BatchSettings

SIZE = 16
PEAK = SIZE / execution_seconds(SIZE)


def batching(queue_delay: str, delay_us: int = 2000, **more: Any) -> BatchSettings:
    return BatchSettings(
        max_batch_size=SIZE, max_queue_size=0, max_queue_delay_us=delay_us, queue_delay=queue_delay, **more
    )


@pytest.mark.parametrize("delay_us", [100, 2000, 50_000])
def test_one_client_waits_for_nobody_in_the_long_run(delay_us: int) -> None:
    found = closed_loop(batching("adaptive", delay_us), 1, 1500)
    assert found.reasons["delay"] <= 5 + 1500 / 128
    assert found.reasons["adaptive"] == 1500 - found.reasons["delay"]
    assert found.quantile(0.98) == pytest.approx(execution_seconds(1))


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_a_few_clients_are_put_together_and_no_other_is_waited_for(clients: int) -> None:
    found = closed_loop(batching("adaptive", 5000), clients, 2000)
    late = found.sizes[len(found.sizes) // 2 :]
    assert sum(late) / len(late) > 0.9 * clients
    assert found.rate > 1.5 * closed_loop(batching("fixed", 5000), clients, 500).rate


@pytest.mark.parametrize("clients", [16, 17, 64])
def test_many_clients_still_fill_batches(clients: int) -> None:
    found = closed_loop(batching("adaptive"), clients, 2000)
    assert found.rate > 0.98 * closed_loop(batching("fixed"), clients, 2000).rate


@pytest.mark.parametrize("gap", [5e-5, 1.5e-3])
def test_bursts_fill_batches_after_a_long_time_with_one_client(gap: float) -> None:
    """Requests that come while the first one runs, and such that come only after it, which a probe must find."""
    wanted = batching("adaptive", 40_000)
    scheduler = Scheduler(wanted)
    closed_loop(wanted, 1, 1000, scheduler=scheduler)
    found = open_loop(wanted, [1000 + burst + at * gap for burst in range(40) for at in range(SIZE)], scheduler)
    assert found.sizes[0] == 1, "nobody was expected"
    assert found.sizes[-20:] == [SIZE] * 20


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("delay_us", [300, 2000])
def test_random_arrivals_are_not_later_than_with_a_fixed_delay(load: float, delay_us: int) -> None:
    arrivals = poisson(load * PEAK, 5000, seed=int(load * 10))
    found, fixed = (open_loop(batching(one, delay_us), arrivals) for one in ("adaptive", "fixed"))
    assert found.quantile(0.99) <= fixed.quantile(0.99) * 1.01
    assert found.quantile(0.5) <= fixed.quantile(0.5) * 1.03


def test_rare_requests_are_sent_at_once() -> None:
    arrivals = poisson(100, 1500)
    found, fixed = (open_loop(batching(one), arrivals) for one in ("adaptive", "fixed"))
    assert found.quantile(0.5) == pytest.approx(execution_seconds(1))
    assert fixed.quantile(0.5) == pytest.approx(execution_seconds(1) + 2e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 4e-3), st.integers(1, 20), st.booleans(), st.integers(1, 2)), max_size=60),
    st.floats(1e-5, 5e-3),
)
def test_nobody_waits_beyond_the_delay_or_a_deadline(events: list[Any], took: float) -> None:
    """Whatever comes when: with an idle instance no request is older than the delay, and level 1 goes first."""
    wanted = batching("adaptive", 1000, priority_levels=2)
    scheduler, now, running = Scheduler(wanted), 0.0, None
    queued: list[Entry] = []

    def advance(until: float) -> None:
        nonlocal now, running
        while True:
            times = [] if running is None else [running.at + took]
            times += [due] if (due := scheduler.next_dispatch()) is not None else []
            times += [due] if (due := scheduler.next_expiry()) is not None else []
            if not times or min(times) > until:
                break
            now = max(now, min(times))
            if running is not None and running.at + took <= now:
                scheduler.complete(running, now)
                running = None
            step()
        now = until

    def step() -> None:
        nonlocal running
        scheduler.expire(now)
        if (batch := scheduler.dispatch(now)) is not None:
            running = batch
            levels = [part.entry.level for part in batch.parts]
            assert levels == sorted(levels)
        for one in queued:
            if one.outcome == "waiting":
                assert one.deadline is None or now < one.deadline
                if one.sent < one.rows and running is None:
                    assert now < one.arrived + 1e-3

    for gap, rows, urgent, level in events:
        advance(now + gap)
        one = Entry(rows, "ab"[rows % 2], now, now + 5e-4 if urgent else None, level=level)
        queued.append(one)
        scheduler.submit(one)
        step()
    advance(now + 10)
    assert all(one.outcome != "waiting" for one in queued)
