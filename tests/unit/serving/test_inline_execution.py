# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Short requests run in the thread that received them, with the bounds of queued ones; long ones never do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from serving_clients import Client, until
from serving_models import WAIT, FaultyEngine, Gate, ask, rows_of, serve_gated

import xpuruntime as xrt
from xpuruntime.errors import EngineFailed
from xpuruntime.serving.batching.execution import ShortRuns
from xpuruntime.serving.messages import InferResponse, ServingError, Status
from xpuruntime.serving.protocol.datatypes import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xpuruntime.serving.models.service import Models

Serve = "Callable[..., Models]"
X = rows_of(1)
#: So much that a run on a busy machine is short as well.
AMPLE = {"inline_below_us": 100_000}


def dispatches(service: Models) -> dict[str, int]:
    return service.evidence("m", "evidence")["dispatches"]


def inline(service: Models, **more: Any) -> InferResponse:
    """Ask until a request runs inline."""
    ran: list[InferResponse] = []

    def once() -> bool:
        response = service.respond(ask("m", {"x": X}, **more))
        if isinstance(response, InferResponse):
            ran.append(response)
        else:
            response.result(WAIT)
        return bool(ran)

    assert until(once), "no request ran inline"
    return ran[0]


def hooked(mlp: Path, serve: Serve, before: Callable[[Any], None], **batching: Any) -> tuple[Models, FaultyEngine]:
    """Serve a model that is known to be short, with a hook before its next runs."""
    engine = FaultyEngine(before)
    engine.armed = False
    service = serve({"m": {"source": str(mlp), "batching": {**AMPLE, **batching}}}, registry=engine.registry())
    short = service.slots["m"].version().batcher.short
    assert short is not None
    short.limit = WAIT  # whatever a busy machine does
    inline(service)
    engine.armed = True
    return service, engine


def test_a_short_request_runs_inline_with_the_same_outputs_and_counters(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "batching": AMPLE}})
    with xrt.InferenceSession(str(mlp), device="cpu") as session:
        expected = session.run({"x": X})["y"]
    found = inline(service, id="7", parameters={"xrt_evidence": True})
    np.testing.assert_array_equal(found.outputs[0].data, expected)
    assert found.id == "7"
    assert found.parameters["xrt_dispatch"] == "inline"
    (stats,) = service.statistics("m")["model_stats"]
    counted = dispatches(service)
    assert counted["inline"] >= 1
    assert stats["inference_stats"]["success"]["count"] == sum(counted.values()) == stats["execution_count"]
    assert stats["inference_stats"]["compute_infer"]["ns"] > 0


@pytest.mark.parametrize(
    "batching",
    [{"inline_below_us": 0}, {**AMPLE, "max_batch_size": 8, "max_queue_delay_us": 100}, {"inline_below_us": 1}],
)
def test_where_waiting_is_better_nothing_is_inline(mlp: Path, serve: Serve, batching: dict[str, int]) -> None:
    service = serve({"m": {"source": str(mlp), "batching": batching}})
    for _ in range(20):
        found = service.respond(ask("m", {"x": X}))
        assert isinstance(found, Future)
        found.result(WAIT)
    assert dispatches(service)["inline"] == 0


def test_with_an_access_log_nothing_is_inline(mlp: Path, serve: Serve) -> None:
    lines: list[Any] = []
    service = serve({"m": {"source": str(mlp), "batching": AMPLE}}, log=lambda *one: lines.append(one))
    for _ in range(10):
        found = service.respond(ask("m", {"x": X}))
        assert isinstance(found, Future)
        found.result(WAIT)
    assert until(lambda: len(lines) == 10)


@pytest.mark.parametrize("sizes", ["a request's", "of a shape", "of the model"])
def test_where_values_of_a_request_say_how_much_is_computed_nothing_is_inline(
    serve: Serve, tmp_path: Path, sizes: str
) -> None:
    inputs = [helper.make_tensor_value_info("v", TensorProto.FLOAT, [1])]
    inputs += [helper.make_tensor_value_info("n", TensorProto.INT64, [2])]
    nodes = {
        "a request's": [helper.make_node("Abs", ["n"], ["sizes"])],
        "of a shape": [helper.make_node("Shape", ["n"], ["sizes"])],
        "of the model": [helper.make_node("Constant", [], ["sizes"], value_ints=[2, 2])],
    }[sizes]
    nodes += [helper.make_node("Expand", ["v", "sizes"], ["y"]), helper.make_node("Neg", ["n"], ["z"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    outputs += [helper.make_tensor_value_info("z", TensorProto.INT64, [2])]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), ir_version=9)
    model.opset_import[0].version = 17
    onnx.save(model, tmp_path / "m.onnx")
    service = serve({"m": {"source": str(tmp_path / "m.onnx"), "batching": AMPLE}})
    request = {"v": np.ones(1, np.float32), "n": np.array([2, 2], np.int64)}
    found: list[Any] = []
    for _ in range(20):
        found.append(service.respond(ask("m", request)))
        if isinstance(found[-1], Future):
            found[-1].result(WAIT)
    assert any(isinstance(one, InferResponse) for one in found) == (sizes != "a request's")


def test_a_request_with_large_outputs_is_queued_however_short(mlp: Path, serve: Serve) -> None:
    """Its thread encodes them, which takes longer."""
    service = serve({"m": {"source": str(mlp), "batching": AMPLE}})
    short = service.slots["m"].version().batcher.short
    assert short is not None
    short.limit = WAIT
    inline(service)
    for _ in range(5):
        found = service.respond(ask("m", {"x": rows_of(1, INLINE_BYTES // 256 + 1)}))
        assert isinstance(found, Future)
        found.result(WAIT)


def test_a_long_model_does_not_hold_health_routes_up(mlp: Path, serve: Serve) -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
    from xpuruntime.serving.protocol.rest import write_request
    from xpuruntime.serving.server import Server

    service, gate = serve_gated(serve, {"m": {"source": str(mlp), "batching": {"inline_below_us": 1}}})
    body, length = write_request(ask("m", {"x": X}), binary=True)
    headers = {"Inference-Header-Content-Length": str(length)}
    answers: list[int] = []
    with Server(service, http="127.0.0.1:0") as server:
        client = Client(server.http_address)
        asking = threading.Thread(
            target=lambda: answers.append(client.post("/v2/models/m/infer", body, **headers).status)
        )
        asking.start()
        assert gate.come.wait(WAIT)
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/m"):
            assert client.get(path).status == 200
        assert not answers
        gate.open.set()
        asking.join(WAIT)
    assert answers == [200]
    assert dispatches(service)["inline"] == 0


def test_a_model_that_is_long_at_times_is_queued_after_it_was(mlp: Path, serve: Serve) -> None:
    service, engine = hooked(mlp, serve, lambda feeds: time.sleep(0.3))
    service.slots["m"].version().batcher.short.limit = 0.1
    assert isinstance(service.respond(ask("m", {"x": X})), InferResponse)  # nobody could know
    engine.armed = False
    for _ in range(20):
        found = service.respond(ask("m", {"x": X}))
        assert isinstance(found, Future)
        found.result(WAIT)


def test_a_deadline_that_passes_inline_is_told(mlp: Path, serve: Serve) -> None:
    service, _ = hooked(mlp, serve, lambda feeds: time.sleep(0.5))
    with pytest.raises(ServingError, match=r"the deadline passed after .* while it ran") as caught:
        service.respond(ask("m", {"x": X}, deadline=time.monotonic() + 0.2))
    assert caught.value.code is Status.DEADLINE_EXCEEDED
    with pytest.raises(ServingError, match="had passed when the request arrived"):
        service.respond(ask("m", {"x": X}, deadline=time.monotonic() - 1))


def test_an_error_inline_fails_its_request_alone_and_is_counted_once(mlp: Path, serve: Serve) -> None:
    def before(feeds: dict[str, Any]) -> None:
        raise EngineFailed("the engine is broken")

    service, engine = hooked(mlp, serve, before)
    with pytest.raises(ServingError, match="the engine is broken") as caught:
        service.respond(ask("m", {"x": X}))
    assert caught.value.code is Status.INTERNAL
    engine.armed = False
    inline(service)
    with pytest.raises(ServingError, match="no input 'z'"):
        service.respond(ask("m", {"z": X}))
    (stats,) = service.statistics("m")["model_stats"]
    assert stats["inference_stats"]["fail"]["count"] == 2
    assert service.evidence("m", "evidence")["failures"] == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 1, "OTHER": 1}


def test_what_comes_during_an_inline_run_is_queued_bounded_and_cancelled(mlp: Path, serve: Serve) -> None:
    gate = Gate()
    service, engine = hooked(mlp, serve, gate, max_queue_size=2)
    found: list[Any] = []
    receiving = threading.Thread(target=lambda: found.append(service.respond(ask("m", {"x": X}))))
    receiving.start()
    assert gate.come.wait(WAIT)
    (version,) = service.slots["m"].loaded
    assert version.batcher.state().running == 1
    assert version.batcher.unanswered == 1
    queued = [service.respond(ask("m", {"x": X})) for _ in range(2)]
    assert all(isinstance(one, Future) for one in queued)
    with pytest.raises(ServingError, match="is full: 2 requests wait"):
        service.respond(ask("m", {"x": X}))
    assert queued[0].cancel()
    with pytest.raises(ServingError, match="the deadline passed"):
        service.respond(ask("m", {"x": X}, deadline=time.monotonic() + 0.05)).result(WAIT)
    gate.open.set()
    receiving.join(WAIT)
    assert isinstance(found[0], InferResponse)
    assert queued[1].result(WAIT).outputs[0].shape == (1, 64)
    assert len(engine.seen) == 2


def test_unloading_waits_for_an_inline_run(mlp: Path, serve: Serve) -> None:
    gate = Gate()
    service, _ = hooked(mlp, serve, gate)
    found: list[Any] = []
    receiving = threading.Thread(target=lambda: found.append(service.respond(ask("m", {"x": X}))))
    receiving.start()
    assert gate.come.wait(WAIT)
    unloading = threading.Thread(target=service.unload, args=("m", {}))
    unloading.start()
    unloading.join(0.2)
    assert unloading.is_alive()
    with pytest.raises(ServingError, match=r"is not served|is being unloaded"):
        service.respond(ask("m", {"x": X}))
    gate.open.set()
    for thread in (receiving, unloading):
        thread.join(WAIT)
        assert not thread.is_alive()
    assert isinstance(found[0], InferResponse)


def test_a_shape_is_short_by_its_best_time() -> None:
    short = ShortRuns(200e-6)
    assert not short.allow("a", 1.0)
    short.queued("a", 5e-3)
    assert not short.allow("a", 1.0)
    short.queued("a", 100e-6)
    short.queued("a", 9e-3)
    assert short.allow("a", 1.0)
    assert not short.allow("b", 1.0)


@pytest.mark.parametrize("took", [0.001, 0.02, 3.0])
def test_executions_above_the_limit_take_a_twentieth_of_the_time_at_most(took: float) -> None:
    short = ShortRuns(200e-6)
    short.queued("a", 100e-6)
    now, held = 100.0, 0.0
    while now < 700.0:
        if short.allow("a", now):
            now += took
            held += took
            short.ran(took, now)
        else:
            now += 0.001
    assert held <= 600 / 20 + took


def test_many_shapes_are_bounded() -> None:
    short = ShortRuns(200e-6)
    for one in range(5000):
        short.queued(one, 1e-6)
    assert len(short._best) <= 1024
    assert short.allow(4999, 1.0)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_one_client_is_served_inline(mlp: Path, serve: Serve, kind: str) -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
    grpc = pytest.importorskip("grpc", reason="needs grpcio, of the extra serve")
    from xpuruntime.serving.protocol.infer_messages import write_infer_request
    from xpuruntime.serving.protocol.rest import write_request
    from xpuruntime.serving.server import Server

    service = serve({"m": {"source": str(mlp), "batching": AMPLE}})
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        if kind == "http":
            client = Client(server.http_address)
            body, length = write_request(ask("m", {"x": X}), binary=True)
            headers = {"Inference-Header-Content-Length": str(length)}
            assert until(
                lambda: (
                    client.post("/v2/models/m/infer", body, **headers).status == 200
                    and dispatches(service)["inline"] > 10
                )
            )
        else:
            with grpc.insecure_channel(server.grpc_address) as channel:
                call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                message = write_infer_request(ask("m", {"x": X}))
                assert until(lambda: call(message, timeout=20) and dispatches(service)["inline"] > 10)
