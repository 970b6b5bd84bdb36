# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Two instances on a device that computes one batch after the other: batches fill while it is busy."""

from __future__ import annotations

from typing import Any

import pytest
from queue_simulation import closed_loop, execution_seconds, open_loop, poisson

from xpuruntime.serving.batching.scheduler import Dispatch, Entry, Scheduler
from xpuruntime.serving.batching.settings import BatchSettings

SIZE = 16


def batching(delay_us: int, **more: Any) -> BatchSettings:
    return BatchSettings(max_batch_size=SIZE, max_queue_size=0, max_queue_delay_us=delay_us, **more)


def two(wanted: BatchSettings, *, serial: bool = True) -> Scheduler:
    return Scheduler(wanted, 2, serial=serial)


def one_running() -> tuple[Scheduler, Dispatch]:
    """Return a scheduler that has timed a batch, of 100 ms, and one that has been running since 1.0."""
    scheduler = two(batching(1000))
    scheduler.submit(Entry(SIZE, "g", 0.0))
    first = scheduler.dispatch(0.0)
    assert first is not None
    scheduler.complete(first, 0.1)
    scheduler.submit(Entry(SIZE, "g", 1.0))
    running = scheduler.dispatch(1.0)
    assert running is not None
    return scheduler, running


@pytest.mark.parametrize("delay_us", [0, 200, 1000])
@pytest.mark.parametrize("queue_delay", ["adaptive", "fixed"])
def test_batches_are_full_although_clients_take_longer_than_the_delay(delay_us: int, queue_delay: str) -> None:
    """32 clients think for as long as the device computes a full batch, less what is left for preparing the next."""
    wanted = batching(delay_us, queue_delay=queue_delay)
    think = 0.2 * execution_seconds(SIZE)
    found = closed_loop(wanted, 2 * SIZE, 4000, think=think, scheduler=two(wanted), one_stream=True)
    before = closed_loop(wanted, 2 * SIZE, 4000, think=think, scheduler=two(wanted, serial=False), one_stream=True)
    assert found.rate >= before.rate
    assert sum(found.sizes) / len(found.sizes) > 0.85 * SIZE
    if delay_us < 1000:
        assert found.rate > 1.05 * before.rate
        assert found.quantile(0.5) < before.quantile(0.5)


@pytest.mark.parametrize("load", [0.1, 0.4, 0.8])
def test_random_requests_wait_no_longer(load: float) -> None:
    wanted = batching(1000)
    arrivals = poisson(load * SIZE / execution_seconds(SIZE), 4000)
    found = open_loop(wanted, arrivals, two(wanted), one_stream=True)
    before = open_loop(wanted, arrivals, two(wanted, serial=False), one_stream=True)
    for share in (0.5, 0.99):
        assert found.quantile(share) <= 1.02 * before.quantile(share)


def test_a_batch_that_is_not_full_is_sent_shortly_before_the_device_is_free() -> None:
    scheduler = two(batching(1000, queue_delay="fixed"))
    for at in (0.0, 1.0, 2.0):  # each takes 100 ms, of which 10 ms are for its inputs
        scheduler.submit(Entry(SIZE, "g", at))
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
        scheduler.submit(Entry(SIZE - 1, "g", 1.012))
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
