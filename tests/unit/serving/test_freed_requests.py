# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The tensors of an answered request are freed at once, and not by Python's next cyclic garbage collection."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import time
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, ask, eventually, serve_gated

from xpuruntime.serving.http.application import asgi_app
from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, ServingError
from xpuruntime.serving.protocol.infer_messages import read_infer_request, write_infer_request
from xpuruntime.serving.protocol.rest_request import read_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from xpuruntime.serving.models.service import Models


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fresh() -> np.ndarray:
    return np.ones((1, 64), np.float32)


def dead(*references: weakref.ref[Any]) -> bool:
    # The thread that has answered may still have the request in a variable.
    return bool(eventually(lambda: all(reference() is None for reference in references), 5))


@pytest.mark.parametrize("size", [0, 8])
def test_of_a_request_that_was_queued(size: int, mlp: Path, serve: Callable[..., Models]) -> None:
    service = serve({"m": {"source": str(mlp), "batching": {"max_batch_size": size, "inline_below_us": 0}}})
    arrays = [fresh() for _ in range(20)]
    references = [weakref.ref(array) for array in arrays]
    futures = [service.infer(ask("m", {"x": arrays.pop()})) for _ in range(20)]
    for future in futures:
        future.result(WAIT)
    del future, futures
    assert dead(*references)


def test_of_a_request_that_ran_inline(mlp: Path, serve: Callable[..., Models]) -> None:
    service = serve({"m": {"source": str(mlp), "batching": {"inline_below_us": 100_000}}})
    for _ in range(200):
        array = fresh()
        reference = weakref.ref(array)
        found = service.respond(ask("m", {"x": array}))
        inline = isinstance(found, InferResponse)
        if not inline:
            found.result(WAIT)
        del array, found
        assert dead(reference)
        if inline:
            return
    raise AssertionError("no request ran inline")


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_of_a_request_that_nobody_waits_for(end: str, mlp: Path, serve: Callable[..., Models]) -> None:
    service, gate = serve_gated(serve, {"m": {"source": str(mlp)}})
    running = service.infer(ask("m", {"x": fresh()}))
    assert gate.come.wait(WAIT)
    array = fresh()
    reference = weakref.ref(array)
    soon = {"deadline": time.monotonic() + 0.02} if end == "expired" else {}
    future = service.infer(ask("m", {"x": array}, **soon))
    del array
    if end == "cancelled":
        assert future.cancel()
    else:
        with pytest.raises(ServingError, match="deadline"):
            future.result(WAIT)
    del future
    gate.open.set()
    running.result(WAIT)
    assert dead(reference)


def inputs(name: str, *shape: int) -> str:
    data = [0] * int(np.prod(shape))
    return json.dumps({"inputs": [{"name": name, "shape": shape, "datatype": "FP32", "data": data}]})


#: Status and body.
BODIES: dict[str, tuple[int, str | bytes]] = {
    "valid": (200, inputs("x", 200, 64)),
    "of a wrong input": (400, inputs("z", 20_000)),
    "small and wrong": (400, inputs("z", 1)),
    "malformed": (400, '{"inputs": [' + " " * 100_000),
    "a bomb": (413, gzip.compress(bytes(20_000_000))),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_body_is_let_go_of_by_http(what: str, mlp: Path, serve: Callable[..., Models]) -> None:
    """Nothing that is left in a cycle, as futures leave some, holds a request or a frame that has read its body."""
    status, body = BODIES[what]
    app = asgi_app(serve({"m": {"source": str(mlp)}}))
    headers = [(b"content-encoding", b"gzip")] if isinstance(body, bytes) else []
    scope = {"type": "http", "method": "POST", "path": "/v2/models/m/infer", "headers": headers, "query_string": b""}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if sent:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": body if isinstance(body, bytes) else body.encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    gc.collect()
    asyncio.run(app(scope, receive, send))
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(0)
    left = [type(one).__name__ for one in gc.garbage if isinstance(one, (InferRequest, types.FrameType))]
    gc.garbage.clear()
    assert (sent[0]["status"], left) == (status, [])


@pytest.mark.parametrize("form", ["REST", "gRPC"])
def test_a_body_is_let_go_of_once_its_request_was_read(form: str) -> None:
    body = np.ones(64, np.uint8)  # stands for the bytes that a transport received
    tensor = {"name": "x", "shape": [64], "datatype": "UINT8", "parameters": {"binary_data_size": 64}}
    head = json.dumps({"id": form, "inputs": [tensor]}).encode()
    if form == "gRPC":
        message = write_infer_request(InferRequest(form, [InferTensor("x", "UINT8", (64,), body)]))
        body = np.frombuffer(bytearray(message), np.uint8)
    else:
        body = np.frombuffer(bytearray(head + bytes(body)), np.uint8)
    reference = weakref.ref(body)
    for _ in range(2):  # the first is remembered, and the second is read as it was
        if form == "gRPC":
            asked = read_infer_request(memoryview(body))
        else:
            asked = read_request(memoryview(body), form, "", len(head)).request
        assert asked.inputs[0].data.tolist() == [1] * 64
        del asked
    del body
    assert reference() is None
