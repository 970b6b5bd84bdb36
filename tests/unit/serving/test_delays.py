# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How long a batch waits: for others that are expected, and behind one that a device computes, in simulated load."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuruntime.lockfile.measured import BatchTime
from xpuruntime.serving.batching.scheduler import Dispatch, Entry, Scheduler
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.models.loading import choose_limits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.serving.batching.settings import BatchSettings


def execution_seconds(rows: int) -> float:
    """Return the time of an execution: a millisecond, and a tenth of one for each row."""
    return 1e-3 + 1e-4 * rows


@dataclass
class Outcome:
    """Latencies in the order of answers, rows of the batches, why they were sent, and seconds in all."""

    latencies: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def quantile(self, share: float) -> float:
        return sorted(self.latencies)[int(share * len(self.latencies))]

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds


def poisson(rate: float, requests: int, seed: int = 0) -> list[float]:
    """Return random moments, so many a second."""
    draw, at, results = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate)
        results.append(at)
    return results


def open_loop(
    wanted: BatchSettings, arrivals: Iterable[float], scheduler: Scheduler | None = None, *, one_stream: bool = False
) -> Outcome:
    """Send requests at these moments, whatever the server does."""
    sends = [(at, 0) for at in arrivals]
    return _run(scheduler or Scheduler(wanted), sends, 0, 0.0, random.Random(0), one_stream)


def closed_loop(
    wanted: BatchSettings,
    clients: int,
    requests: int,
    *,
    think: float = 2e-4,
    scheduler: Scheduler | None = None,
    one_stream: bool = False,
) -> Outcome:
    """Have clients send their next request a random time, `think` at the mean, after each answer.

    With `one_stream` executions of several instances run one after the other.
    """
    draw = random.Random(clients)
    sends = [(draw.uniform(0, 1e-3), client) for client in range(clients)]
    return _run(scheduler or Scheduler(wanted), sends, requests, think, draw, one_stream)


def _run(
    scheduler: Scheduler,
    sends: list[tuple[float, int]],
    again: int,
    think: float,
    draw: random.Random,
    one_stream: bool = False,
) -> Outcome:
    """Run until nothing is left; with `again`, clients send until so many requests have been answered."""
    outcome = Outcome()
    ends: list[tuple[float, int, Dispatch]] = []
    heapq.heapify(sends)
    free = 0.0
    while sends or ends or scheduler.waiting:
        times = [queue[0][0] for queue in (sends, ends) if queue]
        times += [due] if (due := scheduler.next_dispatch()) is not None else []
        outcome.seconds = now = max(outcome.seconds, min(times))
        while sends and sends[0][0] <= now:
            at, client = heapq.heappop(sends)
            scheduler.submit(Entry(1, "g", at, payload=client))
        while ends and ends[0][0] <= now:
            scheduler.complete(heapq.heappop(ends)[2], now)
        for entry in scheduler.take_ready():
            outcome.latencies.append(now - entry.arrived)
            if len(outcome.latencies) < again:
                heapq.heappush(sends, (now + think * draw.expovariate(1), entry.payload))
        while (batch := scheduler.dispatch(now)) is not None:
            outcome.reasons[batch.reason] += 1
            outcome.sizes.append(batch.rows)
            free = (max(free, now) if one_stream else now) + execution_seconds(batch.rows)
            heapq.heappush(ends, (free, len(outcome.sizes), batch))
    return outcome


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
        entry = Entry(rows, "ab"[rows % 2], now, now + 5e-4 if urgent else None, level=level)
        queued.append(entry)
        scheduler.submit(entry)
        step()
    advance(now + 10)
    assert all(one.outcome != "waiting" for one in queued)


SERIAL_SIZE = 16


def serial_batching(delay_us: int, **more: Any) -> BatchSettings:
    return BatchSettings(max_batch_size=SERIAL_SIZE, max_queue_size=0, max_queue_delay_us=delay_us, **more)


def two(wanted: BatchSettings, *, serial: bool = True) -> Scheduler:
    return Scheduler(wanted, 2, serial=serial)


def one_running() -> tuple[Scheduler, Dispatch]:
    """Return a scheduler that has timed a batch, of 100 ms, and one that has been running since 1.0."""
    scheduler = two(serial_batching(1000))
    scheduler.submit(Entry(SERIAL_SIZE, "g", 0.0))
    first = scheduler.dispatch(0.0)
    assert first is not None
    scheduler.complete(first, 0.1)
    scheduler.submit(Entry(SERIAL_SIZE, "g", 1.0))
    running = scheduler.dispatch(1.0)
    assert running is not None
    return scheduler, running


@pytest.mark.parametrize("delay_us", [0, 200, 1000])
@pytest.mark.parametrize("queue_delay", ["adaptive", "fixed"])
def test_batches_are_full_although_clients_take_longer_than_the_delay(delay_us: int, queue_delay: str) -> None:
    """32 clients think for as long as the device computes a full batch, less what is left for preparing the next."""
    wanted = serial_batching(delay_us, queue_delay=queue_delay)
    think = 0.2 * execution_seconds(SERIAL_SIZE)
    found = closed_loop(wanted, 2 * SERIAL_SIZE, 4000, think=think, scheduler=two(wanted), one_stream=True)
    before = closed_loop(
        wanted, 2 * SERIAL_SIZE, 4000, think=think, scheduler=two(wanted, serial=False), one_stream=True
    )
    assert found.rate >= before.rate
    assert sum(found.sizes) / len(found.sizes) > 0.85 * SERIAL_SIZE
    if delay_us < 1000:
        assert found.rate > 1.05 * before.rate
        assert found.quantile(0.5) < before.quantile(0.5)


def test_a_batch_that_is_not_full_is_sent_shortly_before_the_device_is_free() -> None:
    scheduler = two(serial_batching(1000, queue_delay="fixed"))
    for at in (0.0, 1.0, 2.0):  # each takes 100 ms, of which 10 ms are for its inputs
        scheduler.submit(Entry(SERIAL_SIZE, "g", at))
        timed = scheduler.dispatch(at)
        assert timed is not None
        if at < 2.0:
            scheduler.complete(timed, at + 0.1, preparation=0.01)
    scheduler.submit(Entry(1, "g", 2.01))
    assert scheduler.dispatch(2.02) is None, "the delay is over, and the device busy"
    due = scheduler.next_dispatch()
    assert due == pytest.approx(2.1 - 0.25 * 0.1 - 0.01)
    batch = scheduler.dispatch(due)
    assert batch is not None
    assert batch.reason == "busy"


@pytest.mark.parametrize("early", ["full", "free", "drain", "deadline"])
def test_what_cannot_wait_is_sent_at_once(early: str) -> None:
    scheduler, running = one_running()
    scheduler.submit(Entry(1, "g", 1.01, deadline=1.115 if early == "deadline" else None))
    assert scheduler.dispatch(1.0111) is None
    if early == "full":
        scheduler.submit(Entry(SERIAL_SIZE - 1, "g", 1.012))
    elif early == "free":
        scheduler.complete(running, 1.02)
    elif early == "drain":
        scheduler.drain()
    batch = scheduler.dispatch(1.02)
    assert batch is not None
    assert batch.reason == {"free": "delay"}.get(early, early)


def test_a_device_that_is_late_holds_nothing_back_for_longer_than_was_expected() -> None:
    scheduler, _ = one_running()
    scheduler.submit(Entry(1, "g", 1.05))
    late = scheduler.dispatch(5.0)
    assert late is not None
    assert late.reason == "busy"


REQUESTS = 4000


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7])
@pytest.mark.parametrize("p99", [0.004, 0.006, 0.010])
def test_what_is_chosen_for_a_latency_keeps_it(p99: float, load: float) -> None:
    times = {rows: 1e6 * execution_seconds(rows) for rows in (1, 2, 4, 8, 16, 32)}
    curve = [BatchTime(rows=rows, median_us=time, longest_us=time, runs=21) for rows, time in times.items()]
    chosen = choose_limits(curve, p99)
    assert chosen.met
    size = chosen.max_batch_size
    wanted = BatchSettings(max_batch_size=size, max_queue_delay_us=chosen.max_queue_delay_us, max_queue_size=0)
    found = open_loop(wanted, poisson(load * size / execution_seconds(size), REQUESTS))
    assert found.quantile(0.99) <= p99
