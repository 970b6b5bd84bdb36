# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RequestSpans`: a span of OpenTelemetry for each request, with one for its time in the queue and one for its run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.serving.batching.jobs import Job
    from xpuruntime.serving.messages import InferRequest
    from xpuruntime.serving.status import ServingError

__all__ = ["TRACE_HEADERS", "RequestSpans", "request_spans"]

#: W3C's headers of a trace, which metadata of gRPC has by the same names.
TRACE_HEADERS = ("traceparent", "tracestate")


class RequestSpans:
    """Makes the spans of a request when it was answered, in the trace that its client named.

    Parameters
    ----------
    tracer : opentelemetry.trace.Tracer
    """

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
