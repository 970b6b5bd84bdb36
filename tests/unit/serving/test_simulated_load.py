# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Random arrivals on a virtual clock: latencies and batch sizes that settings give, whatever the machine does."""

from __future__ import annotations

import heapq
import random

import pytest

from xpuruntime.serving.batching.entries import Dispatch, Entry
from xpuruntime.serving.batching.scheduler import Scheduler
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.models.slo import Point, choose_limits

REQUESTS = 6000


def seconds(rows: int) -> float:
    """Return the time of an execution: a millisecond, and a tenth of one for each row."""
    return 1e-3 + 1e-4 * rows


def simulate(wanted: BatchSettings, rate: float, seed: int = 0) -> tuple[list[float], list[int]]:
    """Return the latencies of requests that come at random, sorted, and the sizes of the batches."""
    draw, scheduler = random.Random(seed), Scheduler(wanted)
    at, arrivals = 0.0, []
    for _ in range(REQUESTS):
        at += draw.expovariate(rate)
        arrivals.append(at)
    arrivals.reverse()
    now, latencies, sizes = 0.0, [], []
    ends: list[tuple[float, int, Dispatch]] = []
    while arrivals or ends or scheduler.waiting:
        times = [arrivals[-1]] if arrivals else []
        times += [ends[0][0]] if ends else []
        times += [due] if (due := scheduler.next_dispatch()) is not None else []
        now = max(now, min(times))
        while arrivals and arrivals[-1] <= now:
            scheduler.submit(Entry(1, "g", arrivals.pop()))
        while ends and ends[0][0] <= now:
            scheduler.complete(heapq.heappop(ends)[2], now)
        while (batch := scheduler.dispatch(now)) is not None:
            sizes.append(batch.rows)
            heapq.heappush(ends, (now + seconds(batch.rows), len(sizes), batch))
        latencies += [now - one.arrived for one in scheduler.take_ready()]
    assert len(latencies) == REQUESTS
    return sorted(latencies), sizes


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7])
@pytest.mark.parametrize("p99", [0.004, 0.006, 0.010])
def test_what_is_chosen_for_a_latency_keeps_it(p99: float, load: float) -> None:
    curve = [Point(rows, seconds(rows), seconds(rows), 21) for rows in (1, 2, 4, 8, 16, 32)]
    chosen = choose_limits(curve, p99)
    assert chosen.met
    size = chosen.max_batch_size
    wanted = BatchSettings(max_batch_size=size, max_queue_delay_us=chosen.max_queue_delay_us, max_queue_size=0)
    latencies, _ = simulate(wanted, load * size / seconds(size))
    assert latencies[int(0.99 * REQUESTS)] <= p99


def test_a_delay_makes_batches_larger_and_requests_slower() -> None:
    quick, small = simulate(BatchSettings(max_batch_size=16, max_queue_size=0), 500)
    slow, large = simulate(BatchSettings(max_batch_size=16, max_queue_size=0, max_queue_delay_us=5000), 500)
    assert len(large) < len(small) / 2
    assert slow[REQUESTS // 2] > quick[REQUESTS // 2]
    assert slow[-1] < 5e-3 + 2 * seconds(16) + 1e-9


def test_batches_carry_a_load_that_single_requests_do_not() -> None:
    rate = 3 / seconds(1)
    together, sizes = simulate(BatchSettings(max_batch_size=32, max_queue_size=0), rate)
    assert together[int(0.99 * REQUESTS)] < 10e-3
    assert max(sizes) > 1
    alone, _ = simulate(BatchSettings(max_batch_size=1, max_queue_size=0), rate)
    assert alone[int(0.99 * REQUESTS)] > 1
