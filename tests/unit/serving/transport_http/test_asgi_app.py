# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The application by itself: ASGI 3 for any server, without a socket and without the packages of the extra."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

import xpuruntime as xrt
from xpuruntime.serving.http.application import Application
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings

KEY = ((b"authorization", b"Bearer administrator-key"),)
REQUEST = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}).encode()


def call(app, method: str, path: str, messages: list[dict], headers: tuple = (), **scope: str) -> list[dict]:
    sent: list[dict] = []
    left = iter(messages)

    async def receive() -> dict:
        try:
            return next(left)
        except StopIteration:
            await asyncio.Event().wait()
            raise AssertionError from None

    async def send(message: dict) -> None:
        sent.append(message)

    asked = {"type": "http", "method": method, "path": path, "headers": list(headers), **scope}
    asyncio.run(asyncio.wait_for(app(asked, receive, send), 20))
    return sent


@pytest.fixture(scope="module")
def app(service):
    return xrt.serving.asgi_app(service)


def body(data: bytes, *, more: bool = False) -> dict:
    return {"type": "http.request", "body": data, "more_body": more}


def test_a_request_in_parts_is_answered(app):
    start, end = call(app, "POST", "/v2/models/two.words-x_1/infer", [body(REQUEST[:9], more=True), body(REQUEST[9:])])
    assert start["status"] == 200
    assert json.loads(end["body"])["outputs"][0]["data"] == [1.0]
    assert (b"content-length", b"%d" % len(end["body"])) in start["headers"]


def test_nothing_is_sent_to_a_client_that_is_gone(app, service):
    gone = {"type": "http.disconnect"}
    before = len(service.waiting)
    assert call(app, "POST", "/v2/models/slow/infer", [body(REQUEST[:9], more=True), gone]) == []
    assert len(service.waiting) == before
    assert call(app, "POST", "/v2/models/slow/infer", [body(REQUEST), gone]) == []
    assert service.waiting[-1].cancelled()


def test_bodies_together_are_bounded(service):
    app = xrt.serving.asgi_app(service, xrt.serving.TransportOptions(max_buffered=1 << 20))
    large = REQUEST + b" " * (700 << 10)
    scope = {"type": "http", "method": "POST", "path": "/v2/models/two.words-x_1/infer", "headers": []}

    async def ask(first: dict, rest: asyncio.Future | None = None) -> dict:
        sent: list[dict] = []
        left = [first]

        async def receive() -> dict:
            if left:
                return left.pop()
            return await (rest or asyncio.Event().wait())

        async def send(message: dict) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]

    async def several() -> list[int]:
        rest: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        slow = asyncio.ensure_future(ask(body(large[:-1], more=True), rest))
        await asyncio.sleep(0.01)
        found = [await ask(body(large)), await ask(body(REQUEST))]
        rest.set_result(body(large[-1:]))
        found += [await slow, await ask(body(large)), await ask(body(large))]
        assert (b"retry-after", b"1") in found[0]["headers"]
        return [one["status"] for one in found]

    assert asyncio.run(several()) == [429, 200, 200, 200, 200]


def test_the_settings_of_its_models_hold(tmp_path):
    (tmp_path / "key").write_text("administrator-key")
    settings = ServeSettings.coerce(
        {
            "schema": "xpuruntime.serve/1",
            "http": {"max_body": "1KiB"},
            "admin": {"repository": True, "key_file": str(tmp_path / "key")},
        }
    )
    with Models(settings) as models:
        for made in (xrt.serving.asgi_app(models), xrt.serving.Server(models)):
            found = made.options if isinstance(made, Application) else made._options
            assert (found.max_body, found.access.repository) == (1024, True)
            assert found.access.admin_token == "administrator-key"
        index = "/v2/repository/index"
        app = xrt.serving.asgi_app(models)
        assert call(app, "POST", index, [body(b"")])[0]["status"] == 401
        assert call(app, "POST", index, [body(b" " * 1025)], KEY)[0]["status"] == 413
        assert call(app, "POST", index, [body(b"")], KEY)[0]["status"] == 200


def test_the_lifespan_of_servers(app):
    sent: list[dict] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> dict:
        return next(messages)

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(app({"type": "lifespan"}, receive, send))
    assert [one["type"] for one in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_what_is_not_http_is_refused(app):
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(app({"type": "websocket"}, None, send))
    assert sent == [{"type": "websocket.close"}]
    with pytest.raises(NotImplementedError, match="datagram"):
        asyncio.run(app({"type": "datagram"}, None, None))


@pytest.mark.parametrize(
    ("mount", "path", "status"),
    [
        ("/api", "/api/v2", 200),  # as ASGI says, and as Starlette and FastAPI mount
        ("/api/", "/api/v2", 200),
        ("/v2", "/v2/v2/models/echo", 200),
        ("/api", "/v2", 200),  # as hosts that leave the mount out
        ("/api", "/apiv2", 404),
        ("/api", "/api", 404),
    ],
)
def test_paths_begin_where_the_application_is_mounted(app, mount, path, status):
    assert call(app, "GET", path, [], root_path=mount)[0]["status"] == status


def test_it_needs_no_package_of_the_extra():
    code = (
        "import sys, xpuruntime as xrt; app = xrt.serving.asgi_app\n"
        "from xpuruntime.serving.protocol import grpc_messages, grpc_codec\n"
        "print(sorted({'uvicorn', 'httptools', 'grpc', 'google.protobuf', 'starlette', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
