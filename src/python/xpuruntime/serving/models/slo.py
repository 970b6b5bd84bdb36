# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Batch size and delay chosen for a latency, of a measured curve of time by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xpuruntime.measuring.rounds import time_calls
from xpuruntime.serving.models.opening import batch_feeds, batch_sizes, warmup_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.host_runner import HostRunner
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.settings import BatchSettings

__all__ = ["Limits", "Point", "choose_limits", "measure_curve"]

#: Executions of one batch size, and of them those that warm it up; seconds after which no more are made.
_RUNS, _WARM, _BUDGET = 21, 2, 1.0


class Point(NamedTuple):
    """Seconds of an execution of a batch size: the median and the longest of so many."""

    rows: int
    median: float
    longest: float
    runs: int


class Limits(NamedTuple):
    """What was chosen, and of what.

    Attributes
    ----------
    p99 : float
        Seconds that were asked for.
    met : bool
        Whether the smallest batch is quick enough for it.
    max_batch_size, max_queue_delay_us : int
    curve : tuple of Point
    """

    p99: float
    met: bool
    max_batch_size: int
    max_queue_delay_us: int
    curve: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "p99_us": round(self.p99 * 1e6),
            "met": self.met,
            "max_batch_size": self.max_batch_size,
            "max_queue_delay_us": self.max_queue_delay_us,
            "rule": "delay + 2 x the longest execution of the batch size <= p99; delay <= the median execution",
            "curve": [
                {
                    "batch_size": one.rows,
                    "median_us": round(one.median * 1e6),
                    "longest_us": round(one.longest * 1e6),
                    "runs": one.runs,
                }
                for one in self.curve
            ],
        }


def measure_curve(
    session: InferenceSession, layout: Layout, batching: BatchSettings, runner: HostRunner
) -> tuple[Point, ...]:
    """Return times of executions by batch size, in the largest sizes of padded inputs."""
    *_, sizes = warmup_sizes(layout)
    most = max(batching.max_batch_size, 1)
    found = []
    for rows in (most,) if batching.shapes == "fixed" else batch_sizes(most):
        feeds = batch_feeds(session, layout, rows, sizes)

        def run(feeds: dict[str, Any] = feeds) -> Any:
            return runner.run(feeds)

        first = time_calls(run, 1, _WARM)[-1]
        runs = max(3, min(_RUNS, int(_BUDGET / max(first, 1e-9))))
        times = time_calls(run, 1, runs)
        found.append(Point(rows, float(np.median(times)), max(times), runs))
    return tuple(found)


def choose_limits(curve: Sequence[Point], p99: float) -> Limits:
    """Choose the largest batch whose requests stay within a latency, and the delay that is left.

    A request may arrive just after an execution has begun, so it waits for that one, for the delay, and for its own:
    the delay and twice the longest execution must fit. Waiting longer than an execution gains nothing, since what
    arrives during one is put together anyway.
    """
    fitting = [one for one in curve if 2 * one.longest <= p99]
    if not fitting:
        least = min(curve, key=lambda one: one.rows)
        return Limits(p99, False, least.rows, 0, tuple(curve))
    best = max(fitting, key=lambda one: one.rows)
    delay = max(0.0, min(best.median, p99 - 2 * best.longest))
    return Limits(p99, True, best.rows, int(delay * 1e6) if best.rows > 1 else 0, tuple(curve))
