# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A session in a worker process, timed there.

It is imported from its own folder by the interpreter that is compared with, whose xpuruntime may be of another version:
it uses that one's `InferenceSession` alone.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

__all__ = ["open_session", "time_session"]

_OPEN: dict[str, Any] = {}


def open_session(model: str, policy: dict[str, Any], inputs: dict[str, str], trust: bool) -> dict[str, str]:
    """Open a model, run it once with arrays of ``.npy`` files by input name, and return who runs it and versions."""
    import numpy as np

    import xpuruntime

    feeds = {name: np.load(path, allow_pickle=False) for name, path in inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = xpuruntime.InferenceSession(model, policy=policy, trust=trust)
    session.run(feeds)
    _OPEN.update(session=session, run=session.run, feeds=feeds)
    plan = session.plan
    return {
        "engine": plan.engine,
        "engine_version": str(plan.engine_version),
        "device": plan.device,
        "xpuruntime": xpuruntime.__version__,
        "numpy": np.__version__,
    }


def time_session(calls: int, samples: int) -> list[float]:
    """Return the seconds of `samples` times so many runs."""
    run, feeds, clock = _OPEN["run"], _OPEN["feeds"], time.perf_counter
    found = []
    for _ in range(samples):
        start = clock()
        for _ in range(calls):
            run(feeds)
        found.append(clock() - start)
    return found
