# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests with changed bytes, headers and paths: each is answered, with an error that says why or with outputs."""

from __future__ import annotations

import asyncio
import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xpuruntime as xrt
from xpuruntime.serving.messages import InferRequest, InferTensor, RequestedOutput
from xpuruntime.serving.protocol.rest import write_request

ARRAYS = {
    "FP32": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    "BYTES": np.array([b"", b"ab", b"\xff"], object),
    "BOOL": np.array([True, False]),
}
REQUEST = InferRequest(
    "echo", [InferTensor(name, name, array.shape, array) for name, array in ARRAYS.items()], id="7",
    outputs=[RequestedOutput(name) for name in ARRAYS],
)  # fmt: skip
PIECES = [b"\0", b"-", b"9" * 20, b'"', b"[", b"}", b"1e400", b"\xff", b"null"]
PATH = "/v2/models/echo/versions/1/infer"


def changed(draw, data: bytes) -> bytes:
    """Return bytes with a few changed, some left out, or some put in."""
    made = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(made)))
        match draw(st.integers(0, 2)):
            case 0:
                made[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del made[at : at + draw(st.integers(1, 20))]
            case _:
                made[at:at] = draw(st.sampled_from(PIECES))
    return bytes(made)


@st.composite
def requests(draw):
    body, length = write_request(REQUEST, binary=True)
    if draw(st.booleans()):
        body, length = write_request(InferRequest("echo", [REQUEST.inputs[0]]))
    body = changed(draw, body)
    headers = {}
    if length is not None:
        headers[b"inference-header-content-length"] = changed(draw, b"%d" % length)
    if draw(st.integers(0, 3)) == 0:
        body = changed(draw, gzip.compress(body))
        headers[b"content-encoding"] = draw(st.sampled_from([b"gzip", b"deflate", b"br", b"\xff"]))
    headers[b"accept-encoding"] = draw(st.sampled_from([b"", b"gzip", b"deflate", b"\x80"]))
    path = changed(draw, PATH.encode()).decode("latin-1") if draw(st.integers(0, 5)) == 0 else PATH
    return path, headers, body


@pytest.fixture(scope="module")
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_changed_requests_are_answered(service, loop):
    app = xrt.serving.asgi_app(service)
    seen = set()

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(requests())
    def check(request):
        path, headers, body = request
        sent: list[dict] = []
        left = [{"type": "http.request", "body": body}]

        async def receive() -> dict:
            if not left:
                await asyncio.Event().wait()
            return left.pop()

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers.items())}
        loop.run_until_complete(app(scope, receive, send))
        status = sent[0]["status"]
        seen.add(status)
        assert status in (200, 400, 404, 405, 413, 501)
        if status != 200:
            reason = json.loads(sent[-1]["body"])["error"]
            assert ". Fix: " in reason

    check()
    assert {200, 400} <= seen
