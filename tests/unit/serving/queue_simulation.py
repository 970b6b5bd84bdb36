# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Discrete-event simulation of a batching queue on a virtual clock: open loops, closed loops, and what came of them."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xpuruntime.serving.batching.scheduler import Dispatch, Entry, Scheduler

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
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate)
        found.append(at)
    return found


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
    found = Outcome()
    ends: list[tuple[float, int, Dispatch]] = []
    heapq.heapify(sends)
    free = 0.0
    while sends or ends or scheduler.waiting:
        times = [queue[0][0] for queue in (sends, ends) if queue]
        times += [due] if (due := scheduler.next_dispatch()) is not None else []
        found.seconds = now = max(found.seconds, min(times))
        while sends and sends[0][0] <= now:
            at, client = heapq.heappop(sends)
            scheduler.submit(Entry(1, "g", at, payload=client))
        while ends and ends[0][0] <= now:
            scheduler.complete(heapq.heappop(ends)[2], now)
        for entry in scheduler.take_ready():
            found.latencies.append(now - entry.arrived)
            if len(found.latencies) < again:
                heapq.heappush(sends, (now + think * draw.expovariate(1), entry.payload))
        while (batch := scheduler.dispatch(now)) is not None:
            found.reasons[batch.reason] += 1
            found.sizes.append(batch.rows)
            free = (max(free, now) if one_stream else now) + execution_seconds(batch.rows)
            heapq.heappush(ends, (free, len(found.sizes), batch))
    return found
