# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Latency curves: times of executions of a session by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.lockfile.measured import BatchTime
from xpuruntime.measuring.rounds import time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from xpuruntime.engines.host_runner import HostRunner

__all__ = ["time_batches"]

#: Executions of one batch size, and of them those that warm it up; seconds after which no more are made.
_RUNS, _WARM, _BUDGET = 21, 2, 1.0


def time_batches(
    runner: HostRunner, feeds_of: Callable[[int], dict[str, Any]], sizes: Iterable[int]
) -> tuple[BatchTime, ...]:
    """Time executions as a server makes them: `feeds_of` gives the inputs of each of the batch sizes."""
    found = []
    for rows in sizes:
        feeds = feeds_of(rows)

        def run(feeds: dict[str, Any] = feeds) -> Any:
            return runner.run(feeds)

        first = time_calls(run, 1, _WARM)[-1]
        runs = max(3, min(_RUNS, int(_BUDGET / max(first, 1e-9))))
        times = time_calls(run, 1, runs)
        found.append(
            BatchTime(rows=rows, median_us=1e6 * float(np.median(times)), longest_us=1e6 * max(times), runs=runs)
        )
    return tuple(found)
