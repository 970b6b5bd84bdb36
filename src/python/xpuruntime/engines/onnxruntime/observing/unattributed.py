# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Unattributed time: what a run of ONNX Runtime spends outside of its nodes, from its profile."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.onnxruntime.observing.profile import NodeSpan

__all__ = ["outside"]


def outside(windows: Sequence[tuple[float, float]], spans: Sequence[NodeSpan]) -> dict[str, float]:
    """Return what went by before the first node and after the last, and what went by between nodes.

    Parameters
    ----------
    windows : sequence of (float, float)
        Start and end of each counted run.
    spans : sequence of NodeSpan
        The executions of nodes in these runs.

    Returns
    -------
    dict of str to float
        ``call`` and ``between``, medians over the runs, microseconds; empty where no node ran. Nodes that ran at the
        same time are counted once, so that ``between`` is time in which none did.
    """
    ordered = sorted((span.start_us, span.end_us) for span in spans)
    call, between, at = [], [], 0
    for start, end in sorted(windows):
        while at < len(ordered) and ordered[at][0] < start:
            at += 1
        first, reached, idle = None, start, 0.0
        while at < len(ordered) and ordered[at][0] <= end:
            begin, done = ordered[at]
            if first is None:
                first, reached = begin, begin
            idle += max(0.0, begin - reached)
            reached = max(reached, done)
            at += 1
        if first is not None:
            call.append(max(0.0, first - start) + max(0.0, end - reached))
            between.append(idle)
    if not call:
        return {}
    return {"call": float(statistics.median(call)), "between": float(statistics.median(between))}
