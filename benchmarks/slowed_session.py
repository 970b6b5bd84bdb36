# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A session in a worker process whose runs take longer by a known share; see bench_verify.py."""

from __future__ import annotations

import time

import xrt_session_worker as worker

__all__ = ["time_slowed"]


def time_slowed(calls: int, samples: int, share: float) -> list[float]:
    """Return the seconds of `samples` times so many runs, each with a busy wait of a share of its own time."""
    run, feeds, clock = worker._session.run, worker._feeds, time.perf_counter
    found = []
    for _ in range(samples):
        start = clock()
        for _ in range(calls):
            began = clock()
            run(feeds)
            ended = clock()
            until = ended + share * (ended - began)
            while clock() < until:
                pass
        found.append(clock() - start)
    return found
