# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Counted runs of an instrumented copy: its counters after each run, and the wall time of the same runs.

OpenVINO's CPU plugin cuts what a node took of a run to whole microseconds, sums that up since the model was compiled,
and reports the mean, cut to whole microseconds again. So its counters are read after each run, not only after the last:
sums never fall, and each mean bounds its own.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.openvino.slots import infer_call, port_order, share
from xpuruntime.evidence.checkpoints import COLD, COUNTED, checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo

__all__ = ["Counted", "NodeCounter", "bounded", "count", "idle_call_us"]

#: Runs after the cold one that do not count: whoever watched the cold one has emptied the caches.
_SETTLE = 2
#: The counters of a single run say enough where their sum is known to within this share of it.
_COARSE = 0.05
#: Runs of a graph without operators: the first are not counted.
_IDLE_WARM, _IDLE_RUNS = 20, 50
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class NodeCounter:
    """What the counter of one node shows, microseconds. The part cut from each run comes on top: less than one."""

    low: float
    high: float
    sums: tuple[tuple[int, int], ...]

    def of_run(self, number: int) -> tuple[int, int]:
        """Return the least and the most that one counted run can be."""
        (least, most), (least_after, most_after) = self.sums[number : number + 2]
        return max(0, least_after - most), most_after - least


@dataclass(slots=True)
class Counted:
    """What the runs gave."""

    seen: set[str] = field(default_factory=set)
    counts: dict[str, NodeCounter] = field(default_factory=dict)
    spent: list[float] = field(default_factory=list)
    broken: bool = False

    def sums_of_runs(self, names: Iterable[str]) -> tuple[float, ...]:
        """Return what some nodes took of each counted run; empty where the counters are too coarse for that."""
        counts = [self.counts[name] for name in names]
        found = []
        for number, spent in enumerate(self.spent):
            bounds = [one.of_run(number) for one in counts]
            least, most = (sum(pair[i] for pair in bounds) for i in (0, 1))
            if most - least > _COARSE * spent:
                return ()
            found.append((least + most) / 2)
        return tuple(found)

    def kept(self, names: Iterable[str]) -> list[float]:
        """Return the wall times of the runs but for those in which the machine was away: all, where none is left.

        A run is left out that took more than twice as long as the least, and of which these nodes, whatever their
        counters cut off, have less than half. A thread that the system puts aside mostly waits between nodes.
        """
        counts = [self.counts[name] for name in names]
        found = []
        for number, spent in enumerate(self.spent):
            most = sum(one.of_run(number)[1] + 1 for one in counts)
            if spent <= 2 * min(self.spent) or most >= spent / 2:
                found.append(spent)
        return found or self.spent


def count(compiled: Any, feeds: Mapping[str, Any], runs: int, info: ModelInfo, notes: list[str]) -> Counted:
    """Run once cold, some times to settle, and `runs` times that count; what goes wrong is noted.

    Parameters
    ----------
    compiled : openvino.CompiledModel
        Compiled with ``PERF_COUNT``, and never run.
    feeds : mapping of str to array
    runs : int
    info : ModelInfo
    notes : list of str
    """
    request = compiled.create_infer_request()
    kept = []
    found = Counted()
    read = []
    try:
        for port, index in enumerate(port_order(compiled, info)):
            array, kind = _border(feeds[info.inputs[index].name])
            kept.append(array)
            request.set_input_tensor(port, share(array, kind))
        call = infer_call(request)
        for number in range(1 + _SETTLE + runs):
            call({}, True, False)
            read.append(request.get_profiling_info())
            if number > _SETTLE:
                found.spent.append(request.latency * 1e3)
            if number == 0:
                checkpoint(COLD)
        checkpoint(COUNTED)
    except RuntimeError as error:
        notes.append(f"an instrumented run failed: {' '.join(str(error).split())[:300]}")
        found.broken = True
        return found
    means: dict[str, list[int]] = {}
    for nodes in read:
        for node in nodes:
            means.setdefault(node.node_name, []).append(node.real_time // _MICROSECOND)
    found.counts = {name: bounded(values, runs) for name, values in means.items() if len(values) == len(read)}
    found.seen = {name for name, values in means.items() if any(values)}
    return found


def bounded(means: Sequence[int], runs: int) -> NodeCounter:
    """Return what the last `runs` runs took, of the whole means that were read after each run.

    After `k` runs with a mean of `m`, the sum is at least ``k * m`` and at most ``k * m + k - 1``; and no sum is less
    than one before it.
    """
    least = list(itertools.accumulate((k * mean for k, mean in enumerate(means, 1)), max))
    ends = [k * (mean + 1) - 1 for k, mean in enumerate(means, 1)]
    most = list(itertools.accumulate(reversed(ends), min))[::-1]
    sums = tuple(zip(least, most, strict=True))[-runs - 1 :]
    return NodeCounter(max(0, least[-1] - sums[0][1]) / runs, (most[-1] - sums[0][0]) / runs, sums)


def idle_call_us(compiled: Any) -> float:
    """Return what a request of a compiled graph without operators takes: the median of some, microseconds."""
    request = compiled.create_infer_request()
    call = infer_call(request)
    taken = []
    for number in range(_IDLE_WARM + _IDLE_RUNS):
        call({}, True, False)
        if number >= _IDLE_WARM:
            taken.append(request.latency * 1e3)
    return float(statistics.median(taken))


def _border(array: Any) -> tuple[np.ndarray[Any, Any], Any]:
    if isinstance(array, np.ndarray):
        return array, None
    from xpuruntime.engines.openvino.extended_types import borders

    return borders(array)
