# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModelStatistics`: what is counted of one version of a model, and its form in the protocol's statistics extension."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xpuruntime.serving.batching.scheduler import REASONS

if TYPE_CHECKING:
    from xpuruntime.serving.batching.requests import Execution

__all__ = ["FAILURES", "LATENCY_BUCKETS", "Failure", "ModelStatistics", "StatisticDuration", "StatisticsSnapshot"]

Failure = Literal["REJECTED", "CANCELED", "BACKEND", "OTHER"]

#: Refused by the queue or past its deadline; cancelled; failed in the engine; wrong inputs and the like.
FAILURES: tuple[Failure, ...] = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
#: Upper bounds of the latency histogram, in seconds.
LATENCY_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_REQUESTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_SUCCESS, _FAIL, _QUEUE, _INPUT, _INFER, _OUTPUT = range(6)
#: Requests whose latency is kept for live percentiles.
_RECENT = 4096


class StatisticDuration(NamedTuple):
    """How often, and nanoseconds in all."""

    times: int = 0
    ns: int = 0

    def plain(self) -> dict[str, int]:
        """Return it in the protocol's words."""
        return {"count": self.times, "ns": self.ns}


class StatisticsSnapshot(NamedTuple):
    """All counters at one moment."""

    requests: dict[str, StatisticDuration]
    failures: dict[str, int]
    inferences: int
    executions: int
    reasons: dict[str, int]
    elements: int
    padding: int
    batches: dict[int, tuple[StatisticDuration, StatisticDuration, StatisticDuration]]
    latency_buckets: tuple[int, ...]
    latency_sum: float
    last_inference_ms: int

    @property
    def padding_share(self) -> float:
        """Share of the elements of all executions that are padding."""
        whole = self.elements + self.padding
        return self.padding / whole if whole else 0.0

    def plain(self) -> dict[str, Any]:
        """Return the fields of ``model_stats`` in the statistics extension."""
        none = StatisticDuration().plain()
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {
                **{name: count.plain() for name, count in self.requests.items()},
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": made.plain(),
                    "compute_infer": ran.plain(),
                    "compute_output": taken.plain(),
                }
                for rows, (made, ran, taken) in sorted(self.batches.items())
            ],
        }


class ModelStatistics:
    """Counters of one version. Safe to call from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times, self._ns = [0] * len(_REQUESTS), [0] * len(_REQUESTS)
        self._failures: dict[str, int] = dict.fromkeys(FAILURES, 0)
        self._reasons: dict[str, int] = dict.fromkeys(REASONS, 0)
        #: By rows: how often, and nanoseconds of input, execution and output.
        self._batches: dict[int, list[int]] = {}
        self._inferences = self._executions = self._elements = self._padding = 0
        self._buckets = [0] * (len(LATENCY_BUCKETS) + 1)
        self._latency_sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._last = 0.0

    def executed(self, execution: Execution) -> None:
        """Count one execution."""
        rows = execution.batch.rows
        with self._lock:
            self._executions += 1
            self._reasons[execution.batch.reason] += 1
            self._elements += execution.elements
            self._padding += execution.padding
            if execution.error is not None:
                return
            self._inferences += rows
            found = self._batches.get(rows)
            if found is None:
                found = self._batches[rows] = [0, 0, 0, 0]
            found[0] += 1
            found[1] += execution.input_ns
            found[2] += execution.infer_ns
            found[3] += execution.output_ns
            self._last = time.time()

    def succeeded(self, seconds: float, queue: float, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count one request that was answered, with its times."""
        with self._lock:
            times, ns = self._times, self._ns
            times[_SUCCESS] += 1
            ns[_SUCCESS] += int(seconds * 1e9)
            ns[_QUEUE] += int(queue * 1e9)
            ns[_INPUT] += input_ns
            ns[_INFER] += infer_ns
            ns[_OUTPUT] += output_ns
            self._buckets[bisect_left(LATENCY_BUCKETS, seconds)] += 1
            self._latency_sum += seconds
            self._recent.append(seconds)

    def failed(self, reason: Failure, seconds: float = 0.0) -> None:
        """Count one request that was not answered with outputs."""
        with self._lock:
            self._times[_FAIL] += 1
            self._ns[_FAIL] += int(seconds * 1e9)
            self._failures[reason] += 1

    def latency(self, *quantiles: float) -> tuple[float | None, ...]:
        """Return quantiles of the latest requests in seconds; ``None`` where there was none."""
        with self._lock:
            recent = sorted(self._recent)
        if not recent:
            return (None,) * len(quantiles)
        return tuple(recent[min(len(recent) - 1, int(quantile * len(recent)))] for quantile in quantiles)

    def snapshot(self) -> StatisticsSnapshot:
        """Return all counters."""
        with self._lock:
            succeeded = self._times[_SUCCESS]  # the times of a request are counted once it has succeeded
            times = [self._times[at] if at == _FAIL else succeeded for at in range(len(_REQUESTS))]
            return StatisticsSnapshot(
                {name: StatisticDuration(times[at], self._ns[at]) for at, name in enumerate(_REQUESTS)},
                dict(self._failures),
                self._inferences,
                self._executions,
                dict(self._reasons),
                self._elements,
                self._padding,
                {
                    rows: (
                        StatisticDuration(found[0], found[1]),
                        StatisticDuration(found[0], found[2]),
                        StatisticDuration(found[0], found[3]),
                    )
                    for rows, found in self._batches.items()
                },
                tuple(self._buckets),
                self._latency_sum,
                int(self._last * 1000),
            )
