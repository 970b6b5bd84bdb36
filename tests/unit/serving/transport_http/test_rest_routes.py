# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The REST protocol as an application of ASGI, and its routes."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.serving.http.application import Application, Endpoint, route_of
from xpuruntime.serving.http.bodies import WrongMethodError
from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.protocol.datatypes import DATATYPES

IMAGE = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)


def digits(image: np.ndarray = IMAGE, **more: object) -> dict:
    tensor = {"name": "image", "shape": list(image.shape), "datatype": "FP32", "data": image.ravel().tolist()}
    return {"inputs": [tensor], **more}


def binary(image: np.ndarray = IMAGE, **more: object) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "image", "shape": list(image.shape), "datatype": "FP32"}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": image.nbytes}}], **more}).encode()
    return head + image.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v2", Endpoint("server")),
        ("/v2/", Endpoint("server")),
        ("/v2/health/live", Endpoint("live")),
        ("/v2/health/ready/", Endpoint("ready")),
        ("/v2/models/a-b.C_1", Endpoint("model", "a-b.C_1")),
        ("/v2/models/m/", Endpoint("model", "m")),
        ("/v2/models/m/versions/2", Endpoint("model", "m", "2")),
        ("/v2/models/m/ready", Endpoint("ready", "m")),
        ("/v2/models/m/versions/2/ready", Endpoint("ready", "m", "2")),
        ("/v2/models/m/config", Endpoint("config", "m")),
        ("/v2/models/m/versions/2/stats/", Endpoint("stats", "m", "2")),
        ("/v2/models/stats", Endpoint("statistics")),
        ("/v2/models/stats/versions/1", Endpoint("model", "stats", "1")),
        ("/v2/models/m/plan", Endpoint("plan", "m")),
        ("/v2/models/m/evidence", Endpoint("evidence", "m")),
        ("/v2/models/m/lock", Endpoint("lock", "m")),
    ],
)
def test_paths(path, expected):
    assert route_of("GET", path) == expected
    assert route_of("HEAD", path) == expected


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/models/m/versions/1/infer/", "/v2/repository/index"])
def test_paths_that_take_a_body(path):
    assert route_of("POST", path).action in ("infer", "index")
    with pytest.raises(WrongMethodError, match="takes POST"):
        route_of("GET", path)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "v2", "/v1/models/m", "/v2//", "/v22", "/v2/models", "/v2/models//infer", "/v2/models/m//",
        "/v2/models/m/predict", "/v2/models/m/versions", "/v2/models/m/versions//infer", "/v2/models/m/versions/1/2",
        "/v2/models/a/b/infer", "/v2/health", "/v2/health/alive", "/v2/repository/models/m", "/v2/models/m/infer/x",
        "/v2/../etc/passwd",
    ],
)  # fmt: skip
def test_paths_that_are_none(path):
    with pytest.raises(ServingError, match="there is nothing at") as caught:
        route_of("GET", path)
    assert caught.value.code is Status.NOT_FOUND


@pytest.mark.parametrize("name", ["..", ".", "a b", "a\\b", "é", "a\0", "a" * 129, "a%2fb", "~"])
def test_names_that_no_model_can_have(name):
    with pytest.raises(ServingError, match="cannot be the name of a model"):
        route_of("GET", f"/v2/models/{name}")
    with pytest.raises(ServingError, match="cannot be a version") as caught:
        route_of("GET", f"/v2/models/m/versions/{name}")
    assert caught.value.code is Status.INVALID_ARGUMENT


def test_facts(served):
    get = served.http.get
    assert get("/v2/").json["name"] == "xpuruntime"
    assert get("/v2/health/live").json == {"live": True}
    assert get("/v2/health/ready").json == {"ready": True}
    assert get("/v2/models/digits").json["inputs"][0]["shape"] == [-1, 1, 8, 8]
    assert get("/v2/models/digits/versions/1").json["name"] == "digits"
    assert get("/v2/models/digits/ready").json == {"name": "digits", "ready": True}
    assert get("/v2/models/digits/config").json["max_batch_size"] == 8
    assert get("/v2/models/digits/stats").json["model_stats"][0]["inference_count"] == 3
    assert len(get("/v2/models/stats").json["model_stats"]) == len(served.service.models)
    assert get("/v2/models/digits/plan").json["schema"] == "xpuruntime.plan/1"
    assert get("/v2/models/two.words-x_1").status == 200
    assert get("/metrics", Accept="text/plain").body == b"# for text/plain\nup 1\n"
    assert get("/metrics").headers["content-type"].startswith("text/plain")
    assert served.http.post("/metrics").status == 405
    assert get("/v2").headers["content-type"] == "application/json"
    head = served.http("HEAD", "/v2")
    assert (head.status, head.body) == (200, b"")


def test_what_is_not_ready_says_why(served):
    served.service.why_not_ready = "digits: no answer for 3 s"
    try:
        answer = served.http.get("/v2/health/ready")
    finally:
        served.service.why_not_ready = ""
    assert answer.status == 503
    assert answer.json == {"ready": False, "error": "digits: no answer for 3 s"}
    answer = served.http.get("/v2/models/broken/ready")
    assert answer.status == 503
    assert answer.json == {"name": "broken", "ready": False, "error": "it never ends"}


@pytest.mark.parametrize(
    ("method", "path", "status", "match"),
    [
        ("GET", "/v2/models/none", 404, "there is no model 'none'"),
        ("GET", "/v2/models/digits/versions/7", 404, "there is no model 'digits' 7"),
        ("GET", "/v2/models/none/ready", 404, "there is no model"),
        ("POST", "/v2/models/none/infer", 400, "not a request of the protocol"),
        ("GET", "/v2/models/digits/infer", 405, "takes POST"),
        ("DELETE", "/v2/models/digits", 405, "takes GET, HEAD"),
        ("GET", "/nothing", 404, "there is nothing at '/nothing'"),
        ("GET", "/v2/models/echo/plan", 404, "has no plan"),
        ("GET", "/v2/systemsharedmemory/status", 501, "does not have the extension"),
        ("POST", "/v2/cudasharedmemory/region/r/register", 501, "does not have the extension"),
        ("GET", "/v2/models/a%20b", 400, "cannot be the name of a model"),
        ("GET", "/v2/models/a%2Fb", 404, "there is nothing at"),
        ("GET", "/v2/models/%2e%2e", 400, "cannot be the name of a model"),
    ],
)
def test_wrong_calls_say_why(served, method, path, status, match):
    answer = served.http(method, path)
    assert answer.status == status
    assert match in answer.error
    assert ". Fix: " in answer.error
    assert answer.headers["content-type"] == "application/json"


def test_inference_in_json_and_binary_is_that_of_the_session(served):
    expected = served.service.session.run({"image": IMAGE})["logits"]
    in_json = served.http.post("/v2/models/digits/infer", digits(id="seven"))
    assert in_json.status == 200
    assert in_json.json["id"] == "seven"
    assert in_json.json["model_name"] == "digits"
    output = in_json.json["outputs"][0]
    np.testing.assert_array_equal(np.array(output["data"], np.float32).reshape(output["shape"]), expected)
    body, headers = binary(parameters={"binary_data_output": True})
    answer = served.http.post("/v2/models/digits/versions/1/infer/", body, **headers)
    length = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.body[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": expected.nbytes}
    assert answer.body[length:] == expected.tobytes()
    raw = served.http.post("/v2/models/digits/infer", IMAGE.tobytes(), **{"Inference-Header-Content-Length": "0"})
    assert raw.body.endswith(expected.tobytes())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_both_ways(served, encoding):
    plain, headers = binary()
    make = gzip.compress if encoding == "gzip" else zlib.compress
    headers |= {"Content-Encoding": encoding, "Accept-Encoding": encoding}
    answer = served.http.post("/v2/models/digits/infer", make(plain), **headers)
    assert answer.headers["content-encoding"] == encoding
    undo = gzip.decompress if encoding == "gzip" else zlib.decompress
    assert json.loads(undo(answer.body))["outputs"][0]["shape"] == [1, 10]
    several = served.http.post("/v2/models/digits/infer", digits(), **{"Accept-Encoding": "gzip, deflate"})
    assert "content-encoding" not in several.headers


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_comes_back(served, datatype):
    kind = DATATYPES[datatype].dtype
    array = np.array([b"", b"ab\xff"], object) if datatype == "BYTES" else np.array([0, 1], kind)
    raw = b"\0\0\0\0\3\0\0\0ab\xff" if datatype == "BYTES" else array.tobytes()
    tensor = {"name": datatype, "shape": [2], "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    answer = served.http.post(
        "/v2/models/echo/infer", head + raw, **{"Inference-Header-Content-Length": str(len(head))}
    )
    assert answer.status == 200
    assert answer.body[int(answer.headers["inference-header-content-length"]) :] == raw


def test_a_long_body_is_decoded_and_answered(served):
    made = np.arange(200_000, dtype=np.int64)
    tensor = {"name": "INT64", "shape": [200_000], "datatype": "INT64", "data": made.tolist()}
    answer = served.http.post("/v2/models/echo/infer", {"inputs": [tensor]}, **{"Accept-Encoding": "gzip"})
    assert json.loads(gzip.decompress(answer.body))["outputs"][0]["data"] == made.tolist()


def test_failures_of_a_model(served):
    request = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    full = served.http.post("/v2/models/full/infer", request)
    assert (full.status, full.headers["retry-after"]) == (429, "2")
    assert full.error == "the queue is full. Fix: wait"
    broken = served.http.post("/v2/models/broken/infer", request)
    assert broken.status == 500
    assert "RuntimeError" in broken.error
    assert "secret" not in broken.error
    late = served.http.post("/v2/models/slow/infer", {**request, "parameters": {"timeout": 20_000}})
    assert (late.status, late.error) == (504, "the deadline is over. Fix: give more time")


def test_repository(served):
    assert {one["name"] for one in served.http.post("/v2/repository/index").json} == served.service.models.keys()
    ready = served.http.post("/v2/repository/index", {"ready": True}).json
    assert "broken" not in {one["name"] for one in ready}
    assert served.http.post("/v2/repository/models/echo/load", {"parameters": {"a": 1}}).json == {}
    assert served.http.post("/v2/repository/models/echo/unload").status == 200
    assert served.service.loaded[-2:] == [("load", "echo", {"a": 1}), ("unload", "echo", {})]
    assert served.http.post("/v2/repository/models/none/load").status == 404
    assert served.http.post("/v2/repository/models/echo/load", b"[1]").status == 400
    assert served.http.post("/v2/repository/models/echo/load", {"parameters": [1]}).status == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://rebound.example", "Host": "rebound.example"},
        {"Host": "rebound.example"},
    ],
)
def test_pages_of_other_sites_change_nothing(served, headers):
    before = len(served.service.loaded)
    found = served.http("POST", "/v2/repository/models/digits/unload", b"", headers)
    assert (found.status, len(served.service.loaded)) == (403, before)
    assert "another site" in found.error
    if "Origin" in headers:
        count = len(served.service.requests)
        assert served.http("POST", "/v2/models/digits/infer", digits(), headers).status == 403
        assert len(served.service.requests) == count


def test_a_page_of_the_server_itself_may_ask(served):
    own = {"Origin": f"http://{served.http.host}:{served.http.port}", "Sec-Fetch-Site": "same-origin"}
    assert served.http("POST", "/v2/models/digits/infer", digits(), own).status == 200


def test_optional_keys_may_be_null(served):
    tensor = {**digits()["inputs"][0], "parameters": {"note": None}}
    output = {"name": "logits", "parameters": None}
    body = {"id": None, "parameters": None, "inputs": [tensor], "outputs": [output], "model_name": None}
    assert served.http.post("/v2/models/digits/infer", body).status == 200
    assert served.http.post("/v2/models/digits/infer", {**body, "outputs": None}).status == 200


@pytest.mark.parametrize("size", [5 << 20, 24 << 20])
def test_a_client_that_sends_all_of_a_refused_body_first_gets_the_response(served, size):
    found = served.http.post("/v2/models/digits/infer", bytes(size))
    assert (found.status, found.headers["connection"]) == (413, "close")


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
