# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Logs of requests: `AccessLog`, a line of JSON for each, and `RequestSpans`, its spans of OpenTelemetry."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.files.paths import reason_of
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.serving.batching.requests import Job
    from xpuruntime.serving.messages import InferRequest
    from xpuruntime.serving.status import ServingError

__all__ = ["TRACE_HEADERS", "AccessLog", "RequestLog", "RequestSpans", "both_logs", "request_spans"]


class RequestLog(Protocol):
    """Callback of a request: with its error, if any, its seconds, and what was measured where it was accepted."""

    def __call__(
        self, request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None
    ) -> None:
        """Take one request. Called in many threads."""


def both_logs(one: RequestLog, other: RequestLog) -> RequestLog:
    """Return a log that gives each request to two."""

    def log(request: InferRequest, error: ServingError | None, seconds: float, job: Job | None = None) -> None:
        one(request, error, seconds, job)
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
                line["compute_ms"] = round(sum(one.compute_ns for one in job.executions) / 1e6, 3)
                line["batch"] = max(one.batch.rows for one in job.executions)
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
            warnings.warn(text, XpuRuntimeWarning, stacklevel=2)

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
                ran = sum(one.compute_ns for one in job.executions)
                self._tracer.start_span("execute", within, attributes=_of_executions(job), start_time=began).end(
                    min(began + ran, end)
                )
        span.end(end)


def request_spans() -> RequestSpans | None:
    """Return `RequestSpans` of the tracer provider of this process; ``None`` where there is none."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    from xpuruntime import __version__

    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return RequestSpans(provider.get_tracer("xpuruntime.serving", __version__))


def _attributes(request: InferRequest, error: ServingError | None, job: Job | None) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "xpuruntime.model": request.model[:128],
        "xpuruntime.model_version": request.version[:32],
        "xpuruntime.request_id": request.id[:128],
    }
    if job is not None:
        found["xpuruntime.rows"] = job.feed.rows
    if error is not None:
        found["error.type"] = error.code.name
    return found


def _of_executions(job: Job) -> Mapping[str, Any]:
    last = job.executions[-1]
    return {
        "xpuruntime.executions": len(job.executions),
        "xpuruntime.batch_rows": max(one.batch.rows for one in job.executions),
        "xpuruntime.dispatch": last.batch.reason,
        "xpuruntime.compute_us": sum(one.compute_ns for one in job.executions) // 1000,
    }
