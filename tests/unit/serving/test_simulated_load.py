# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Random arrivals on a virtual clock: latencies and batch sizes that settings give, whatever the machine does."""

from __future__ import annotations

import pytest
from queue_simulation import execution_seconds, open_loop, poisson

from xpuruntime.lockfile.measured import BatchTime
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.models.loading import choose_limits

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


@pytest.mark.parametrize("delay_us", [0, 2000])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_at_seven_tenths_of_the_peak_requests_take_about_two_executions(size: int, delay_us: int) -> None:
    """One may arrive just after an execution began: it waits for that one, and for its own."""
    whole = execution_seconds(size)
    wanted = BatchSettings(max_batch_size=size, max_queue_delay_us=delay_us, max_queue_size=0)
    found = open_loop(wanted, poisson(0.7 * size / whole, REQUESTS))
    assert found.quantile(0.99) <= 2.2 * whole


def test_a_delay_makes_batches_larger_and_requests_slower() -> None:
    arrivals = poisson(500, REQUESTS)
    quick = open_loop(BatchSettings(max_batch_size=16, max_queue_size=0), arrivals)
    slow = open_loop(BatchSettings(max_batch_size=16, max_queue_size=0, max_queue_delay_us=5000), arrivals)
    assert len(slow.sizes) < len(quick.sizes) / 2
    assert slow.quantile(0.5) > quick.quantile(0.5)
    assert max(slow.latencies) < 5e-3 + 2 * execution_seconds(16) + 1e-9


def test_batches_carry_a_load_that_single_requests_do_not() -> None:
    arrivals = poisson(3 / execution_seconds(1), REQUESTS)
    together = open_loop(BatchSettings(max_batch_size=32, max_queue_size=0), arrivals)
    assert together.quantile(0.99) < 10e-3
    assert max(together.sizes) > 1
    alone = open_loop(BatchSettings(max_batch_size=1, max_queue_size=0), arrivals)
    assert alone.quantile(0.99) > 1
