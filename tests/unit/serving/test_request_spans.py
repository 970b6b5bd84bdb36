# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Spans of OpenTelemetry: one trace from the client through the queue to the execution, on both transports."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, ask, rows_of

import xpuruntime as xrt
from xpuruntime.serving.messages import ServingError
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.protocol.infer_messages import write_infer_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

trace = pytest.importorskip("opentelemetry.trace", reason="needs opentelemetry-sdk")

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "tracestate": "vendor=1"}
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Set a tracer provider, and return a function that takes the spans which have ended, by name."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    def taken() -> dict[str, Any]:
        results = {span.name: span for span in exporter.get_finished_spans()}
        exporter.clear()
        return results

    return taken


def settings_of(mlp: Path) -> ServeSettings:
    model = {"source": str(mlp), "batching": {"max_batch_size": 4}}
    return ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"mlp": model}})


def test_a_request_is_in_the_trace_of_its_client(mlp: Path, spans: Callable[[], dict[str, Any]]) -> None:
    with (
        Models(settings_of(mlp)) as service,
        xrt.serving.Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0") as server,
    ):
        assert [name for name, span in spans().items() if span.parent is None] == ["xpuruntime.open"]
        tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}
        body = json.dumps({"id": "7", "inputs": [tensor]}).encode()
        url = f"{server.url}/v2/models/mlp/infer"
        direct, parsed = HEADERS, {**HEADERS, "Accept-Encoding": "gzip"}  # which the two readers of heads take
        for headers in (direct, parsed):
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=WAIT).close()
            check(spans(), "7")
        grpc = pytest.importorskip("grpc")
        with grpc.insecure_channel(server.grpc_address) as channel:
            message = write_infer_request(ask("mlp", {"x": rows_of(1)}, id="8"))
            channel.unary_unary(INFER)(message, timeout=WAIT, metadata=tuple(HEADERS.items()))
        check(spans(), "8")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, b'{"inputs": []}', HEADERS), timeout=WAIT)
        (refused,) = spans().values()
        assert (refused.name, refused.attributes["error.type"]) == ("infer", "INVALID_ARGUMENT")
        assert refused.status.status_code is trace.StatusCode.UNSET  # the client's fault


def check(found: dict[str, Any], id: str) -> None:
    assert set(found) == {"infer mlp", "queue", "execute"}
    whole, queue, execute = found["infer mlp"], found["queue"], found["execute"]
    assert (whole.context.trace_id, whole.parent.span_id) == (TRACE, PARENT)
    assert whole.context.trace_state["vendor"] == "1"
    assert whole.kind is trace.SpanKind.SERVER
    assert {queue.parent.span_id, execute.parent.span_id} == {whole.context.span_id}
    assert whole.start_time == queue.start_time <= queue.end_time == execute.start_time
    assert execute.start_time < execute.end_time <= whole.end_time
    attributes = dict(whole.attributes)
    assert (attributes["xpuruntime.request_id"], attributes["xpuruntime.rows"]) == (id, 1)
    assert execute.attributes["xpuruntime.batch_rows"] == 1
    assert execute.attributes["xpuruntime.dispatch"] in ("idle", "full")


def test_a_fault_of_the_server_and_a_trace_that_is_none(mlp: Path, spans: Callable[[], dict[str, Any]]) -> None:
    with Models(settings_of(mlp)) as service:
        service.infer(ask("mlp", {"x": rows_of(1)}, trace={"traceparent": "00-zz"})).result(WAIT)
        assert spans()["infer mlp"].parent is None
        late = ask("mlp", {"x": rows_of(1)}, deadline=0.0)
        with pytest.raises(ServingError):
            service.infer(late).result(WAIT)
    (span,) = spans().values()
    assert span.attributes["error.type"] == "DEADLINE_EXCEEDED"
    assert span.status.status_code is trace.StatusCode.ERROR


def test_without_a_provider_nothing_is_traced(mlp: Path) -> None:
    with Models(settings_of(mlp)) as service:
        assert not service.traced
        result = service.infer(ask("mlp", {"x": rows_of(1)})).result(WAIT)
    assert np.isfinite(result.outputs[0].data).all()
