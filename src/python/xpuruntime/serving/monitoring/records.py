# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is kept of requests: counters of a version, a line of the access log for each, and spans of OpenTelemetry."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from xpuruntime.errors import InputError, XpuRuntimeWarning, warn
from xpuruntime.files.paths import reason_of
from xpuruntime.printable import printable
from xpuruntime.runtime.telemetry import span_tracer
from xpuruntime.serving.batching.scheduler import REASONS

if TYPE_CHECKING:
    from xpuruntime.serving.batching.requests import Execution, Job
    from xpuruntime.serving.messages import InferRequest, ServingError


class RequestLog(Protocol):
    """Callback of a request: with its error, if any, its seconds, and what was measured where it was accepted."""

    def __call__(
        self, request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None
    ) -> None:
        """Take one request. Called in many threads."""


def both_logs(request_log: RequestLog, other: RequestLog) -> RequestLog:
    """Return a log that gives each request to two."""

    def log(request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None) -> None:
        request_log(request, error, seconds, job)
        other(request, error, seconds, job)

    return log


class AccessLog:
    """Appends to a file; safe to call from many threads, and several processes may have the same file.

    Nothing of a tensor is written, and of a request its id alone. Where the file cannot be written, such as on a full
    disk, lines are counted in `lost`, and the first is warned of: requests are served on.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        #: Lines that could not be written.
        self.lost = 0
        try:
            self._file = 1 if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        except OSError as error:
            raise InputError(
                f"access_log: {path} cannot be written: {reason_of(error)}. Fix: name another file"
            ) from None

    def __call__(
        self, request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None
    ) -> None:
        """Write one line."""
        line: dict[str, Any] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "model": request.model[:128],
            "version": request.version[:32],
            "id": request.id[:128],
            "status": "OK" if error is None else error.code.name,
            "ms": round(seconds * 1e3, 3),
        }
        if job is not None:
            line["rows"] = job.feed.rows
            if job.began is not None:
                line["queue_ms"] = round((job.began - job.entry.arrived) * 1e3, 3)
            if job.executions:
                line["compute_ms"] = round(sum(execution.compute_ns for execution in job.executions) / 1e6, 3)
                line["batch"] = max(execution.batch.rows for execution in job.executions)
        if error is not None:
            line["error"] = str(error)
        data = msgspec.json.encode({key: printable(v) if isinstance(v, str) else v for key, v in line.items()}) + b"\n"
        with self._lock:
            try:
                if self._file >= 0:
                    os.write(self._file, data)
                return
            except OSError as failure:
                self.lost += 1
                if self.lost > 1:
                    return
                text = f"access_log: {self._path} cannot be written: {reason_of(failure)}; requests are served on"
        with contextlib.suppress(XpuRuntimeWarning):  # where warnings are errors, the request still gets its answer
            warn(text)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            file, self._file = self._file, -1
        if file > 1:
            os.close(file)


#: W3C's headers of a trace, which metadata of gRPC has by the same names.
TRACE_HEADERS = ("traceparent", "tracestate")


class RequestSpans:
    """Makes the spans of a request when it was answered, in the trace that its client named."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._trace = tracer, trace
        self._extract = TraceContextTextMapPropagator().extract

    def __call__(
        self, request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None
    ) -> None:
        """Make the spans of one request; see `RequestLog`."""
        trace, end = self._trace, time.time_ns()
        start = end - int(seconds * 1e9)
        name = "infer" if job is None else f"infer {request.model}"  # other names are whatever a client sent
        span = self._tracer.start_span(
            name, self._extract(request.trace or {}), trace.SpanKind.SERVER, _attributes(request, error, job), (), start
        )
        if not span.is_recording():
            return
        if error is not None and error.code.http >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        if job is not None and job.began is not None:
            began = start + int((job.began - job.entry.arrived) * 1e9)
            within = trace.set_span_in_context(span)
            self._tracer.start_span("queue", within, start_time=start).end(began)
            if job.executions:
                ran = sum(execution.compute_ns for execution in job.executions)
                self._tracer.start_span("execute", within, attributes=_of_executions(job), start_time=began).end(
                    min(began + ran, end)
                )
        span.end(end)


def request_spans() -> RequestSpans | None:
    """Return `RequestSpans` of the tracer provider of this process; ``None`` where there is none."""
    tracer = span_tracer("xpuruntime.serving")
    return None if tracer is None else RequestSpans(tracer)


def _attributes(request: InferRequest, error: ServingError | None, job: Job | None) -> Mapping[str, Any]:
    attributes: dict[str, Any] = {
        "xpuruntime.model": request.model[:128],
        "xpuruntime.model_version": request.version[:32],
        "xpuruntime.request_id": request.id[:128],
    }
    if job is not None:
        attributes["xpuruntime.rows"] = job.feed.rows
    if error is not None:
        attributes["error.type"] = error.code.name
    return attributes


def _of_executions(job: Job) -> Mapping[str, Any]:
    last = job.executions[-1]
    return {
        "xpuruntime.executions": len(job.executions),
        "xpuruntime.batch_rows": max(execution.batch.rows for execution in job.executions),
        "xpuruntime.dispatch": last.batch.reason,
        "xpuruntime.compute_us": sum(execution.compute_ns for execution in job.executions) // 1000,
    }


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
        total = self.elements + self.padding
        return self.padding / total if total else 0.0

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
                    "compute_input": input_time.plain(),
                    "compute_infer": ran.plain(),
                    "compute_output": taken.plain(),
                }
                for rows, (input_time, ran, taken) in sorted(self.batches.items())
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
            totals = self._batches.get(rows)
            if totals is None:
                totals = self._batches[rows] = [0, 0, 0, 0]
            totals[0] += 1
            totals[1] += execution.input_ns
            totals[2] += execution.infer_ns
            totals[3] += execution.output_ns
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
                        StatisticDuration(totals[0], totals[1]),
                        StatisticDuration(totals[0], totals[2]),
                        StatisticDuration(totals[0], totals[3]),
                    )
                    for rows, totals in self._batches.items()
                },
                tuple(self._buckets),
                self._latency_sum,
                int(self._last * 1000),
            )
