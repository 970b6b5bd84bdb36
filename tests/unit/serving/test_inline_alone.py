# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests that come one at a time run in the thread that received them, once it has taken what else has come."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_clients import Client, until
from serving_models import WAIT, FaultyEngine, ask, rows_of

from xpuruntime.errors import EngineFailed
from xpuruntime.serving.batching.inline import ShortRuns
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.gate import Gate
from xpuruntime.serving.status import ServingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xpuruntime.serving.models.service import Models

Serve = "Callable[..., Models]"
X = rows_of(1)
#: Batches of what has come together, and an ample limit, so that a run on a busy machine is short as well.
BATCHES = {"max_batch_size": 8, "max_queue_delay_us": 50, "inline_alone_below_us": 100_000}


class Loop:
    """An event loop's `call_soon`: what is to be called later, and a call of it."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []

    def soon(self, call: Callable[[], None]) -> None:
        self.later.append(call)

    def turn(self) -> None:
        later, self.later = self.later, []
        for call in later:
            call()


def inline_count(service: Models) -> int:
    return service.evidence("m", "evidence")["dispatches"]["inline"]


def deferred(service: Models, loop: Loop) -> Future[Any]:
    """Ask until a request waits for the next turn of the loop: the first ones are timed, or waited with for others."""
    for _ in range(200):
        found = service.respond(ask("m", {"x": X}), loop.soon)
        assert isinstance(found, Future)
        if loop.later:
            return found
        found.result(WAIT)
    raise AssertionError("no request waited for the loop")


def run_inline(service: Models, loop: Loop) -> Future[Any]:
    """Ask until a request runs in the turn of the loop; once in a while the scheduler waits for others instead."""
    for _ in range(200):
        before = inline_count(service)
        found = deferred(service, loop)
        assert not found.done()
        loop.turn()
        if inline_count(service) > before:
            return found
        found.result(WAIT)
    raise AssertionError("no request ran inline")


def test_a_request_alone_runs_in_the_turn_of_the_loop(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "batching": BATCHES}})
    expected = service.infer(ask("m", {"x": X})).result(WAIT).outputs[0].data
    found = run_inline(service, Loop())
    assert found.done()
    np.testing.assert_array_equal(found.result().outputs[0].data, expected)
    assert found.result().parameters.get("xrt_dispatch") in (None, "inline")
    assert until(lambda: service.slots["m"].loaded[0].batcher.unanswered == 0)


def test_requests_beside_each_other_run_together_in_a_thread(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "batching": {**BATCHES, "max_queue_delay_us": 0}}})
    loop = Loop()
    first = deferred(service, loop)
    second = service.respond(ask("m", {"x": rows_of(1)}), loop.soon)
    before = inline_count(service)
    loop.turn()
    for one in (first, second):
        assert one.result(WAIT).outputs[0].shape == (1, 64)
    assert inline_count(service) == before


def test_a_request_that_was_cancelled_or_taken_leaves_nothing_to_run(mlp: Path, serve: Serve) -> None:
    service = serve({"m": {"source": str(mlp), "batching": BATCHES}})
    loop = Loop()
    assert deferred(service, loop).cancel()
    before = inline_count(service)
    loop.turn()
    assert inline_count(service) == before
    waiting = deferred(service, loop)
    service.unload("m", {})  # waits for it, in a thread of the batcher
    assert waiting.result(WAIT).outputs[0].shape == (1, 64)
    loop.turn()


def test_an_error_fails_the_request_and_a_long_run_ends_it(mlp: Path, serve: Serve) -> None:
    engine = FaultyEngine()
    engine.armed = False
    service = serve({"m": {"source": str(mlp), "batching": BATCHES}}, registry=engine.registry())
    loop = Loop()
    run_inline(service, loop)

    def broken(feeds: dict[str, Any]) -> None:
        raise EngineFailed("the engine is broken")

    engine.before, engine.armed = broken, True
    found = deferred(service, loop)
    loop.turn()
    with pytest.raises(ServingError, match="the engine is broken"):
        found.result(WAIT)
    engine.before = lambda feeds: time.sleep(0.3)
    run_inline(service, loop)  # nobody could know
    engine.armed = False
    for _ in range(20):
        found = service.respond(ask("m", {"x": X}), loop.soon)
        assert not loop.later
        found.result(WAIT)


@pytest.mark.parametrize(
    "settings",
    [{"inline_alone_below_us": 0}, {"queue_delay": "fixed"}, {"inline_alone_below_us": 1}],
)
def test_where_it_is_not_wanted_a_thread_runs_all(mlp: Path, serve: Serve, settings: dict[str, Any]) -> None:
    service = serve({"m": {"source": str(mlp), "batching": {**BATCHES, **settings}}})
    loop = Loop()
    for _ in range(10):
        service.respond(ask("m", {"x": X}), loop.soon).result(WAIT)
        assert not loop.later


def test_limits_by_settings_and_instances() -> None:
    def limits(instances: int = 1, **settings: Any) -> tuple[int, int] | None:
        found = ShortRuns.of(BatchSettings(**settings), instances)
        return None if found is None else (round(found.limit * 1e6), round(found.alone_limit * 1e6))

    assert limits() == (200, 1000)
    assert limits(2) == (200, 200)
    assert limits(max_batch_size=16) == (50, 1000)
    assert limits(max_batch_size=16, max_queue_delay_us=5) == (0, 1000)
    assert limits(2, max_batch_size=16, max_queue_delay_us=5) is None
    assert limits(max_batch_size=16, max_queue_delay_us=5, queue_delay="fixed") is None
    assert limits(inline_below_us=5000) == (5000, 5000)
    assert limits(inline_below_us=0) is None
    assert limits(max_batch_size=16, inline_below_us=20, inline_alone_below_us=0) == (20, 20)


def test_the_gate_knows_when_requests_come_one_at_a_time() -> None:
    async def main() -> None:
        gate = Gate(0)

        def one(model: str) -> bool:
            with gate:
                return gate.soon(model) is not None

        assert [one("a") for _ in range(4)] == [False, False, True, True]
        assert [one("b"), one("a")] == [False, False]
        assert [one("a") for _ in range(2)] == [False, True]
        with gate:
            assert not one("a"), "another one is being answered"
        assert [one("a") for _ in range(3)] == [False, True, True]

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_one_client_is_served_inline(mlp: Path, serve: Serve, kind: str) -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
    grpc = pytest.importorskip("grpc", reason="needs grpcio, of the extra serve")
    from xpuruntime.serving.protocol.grpc_codec import write_infer_request
    from xpuruntime.serving.protocol.rest import write_request
    from xpuruntime.serving.server import Server

    service = serve({"m": {"source": str(mlp), "batching": BATCHES}})
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        if kind == "http":
            client = Client(server.http_address)
            body, length = write_request(ask("m", {"x": X}), binary=True)
            headers = {"Inference-Header-Content-Length": str(length)}
            for _ in range(40):
                assert client.post("/v2/models/m/infer", body, **headers).status == 200
        else:
            with grpc.insecure_channel(server.grpc_address) as channel:
                call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                for _ in range(40):
                    call(write_infer_request(ask("m", {"x": X})), timeout=20)
    assert inline_count(service) > 10
