# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests that came whole are answered as all others, and who may send them."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest
from serving_clients import Client, until

from xpuruntime.errors import InputError
from xpuruntime.serving.http.application import Application
from xpuruntime.serving.http.direct import DirectInfer
from xpuruntime.serving.protocol.grpc_messages import METHODS, encode
from xpuruntime.serving.server import Server
from xpuruntime.serving.transport.gate import Access
from xpuruntime.serving.transport.options import Tls, TransportOptions

grpc = pytest.importorskip("grpc", reason="needs grpc, of the extra serve")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
pytest.importorskip("httptools", reason="needs httptools, of the extra serve")


def body(at: int = 0, size: int = 1) -> bytes:
    one = {"name": "x", "shape": [size], "datatype": "FP32", "data": [1] * size}
    return json.dumps({"id": str(at), "inputs": [one]}).encode()


def request(made: bytes, model: str = "two.words-x_1", **headers: str) -> bytes:
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: a", f"Content-Length: {len(made)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + made


def connect(served) -> socket.socket:
    connection = socket.create_connection((served.http.host, served.http.port), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def strings(count: int) -> tuple[bytes, int]:
    """Return a request of strings, and the length of its JSON."""
    stated = {"name": "BYTES", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": 20 * count}}
    head = json.dumps({"inputs": [stated], "parameters": {"binary_data_output": True}}).encode()
    return head + (b"\x10\0\0\0" + b"a" * 16) * count, len(head)


def read_responses(sock: socket.socket, count: int) -> list[tuple[int, dict[str, str], bytes]]:
    responses, data = [], b""
    while len(responses) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        if end:
            lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:])
            length = int(headers["content-length"])
            if len(rest) >= length:
                responses.append((int(lines[0].split()[1]), headers, rest[:length]))
                data = rest[length:]
                continue
        part = sock.recv(1 << 16)
        assert part, data
        data += part
    assert not data
    return responses


def heads(text: str) -> bool:
    direct = DirectInfer(Application(SimpleNamespace(infer=None)))
    return direct.head(text.replace("\n", "\r\n").encode()) is not None


def test_which_heads_are_plain():
    good = "POST /v2/models/m/infer HTTP/1.1\nHost: a\nContent-Length: 5"
    assert heads(good)
    assert heads(f"{good}\nConnection: Keep-Alive\nAccept-Encoding: gzip, deflate\nX-A:")
    assert heads("POST /v2/models/m/versions/2/infer HTTP/1.1\ncontent-length: 5\nInference-Header-Content-Length: 5")
    for bad in (
        good.replace("POST", "PUT"),
        good.replace("1.1", "1.0"),
        good.replace("/m/", "/../"),
        good.replace("/m/", "/a%20b/"),
        good.replace("/infer", "/infer?a=1"),
        good.replace("5", "-5"),
        good.replace("5", "+5"),
        good.replace("5", "0"),
        good.replace("5", "99999999999"),
        f"{good}\nContent-Length: 5",
        f"{good}\nTransfer-Encoding: chunked",
        f"{good}\nContent-Encoding: gzip",
        f"{good}\nAccept-Encoding: gzip",
        f"{good}\nExpect: 100-continue",
        f"{good}\nConnection: close",
        f"{good}\nUpgrade: websocket",
        f"{good}\n folded",
        f"{good}\nX A: b",
        f"{good}\nX-A: \x01",
        f"{good}\nInference-Header-Content-Length: 6",
        f"{good}\nInference-Header-Content-Length: 0",
        "POST /v2/models/m/infer HTTP/1.1\nHost: a",
    ):
        assert not heads(bad), bad


def test_heads_that_differ_are_not_kept_for_ever():
    direct = DirectInfer(Application(SimpleNamespace(infer=None)))
    for at in range(1000):
        found = direct.head(b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 5\r\nX-Id: %d" % at)
        assert found is not None
    assert direct.head(b"POST /v2/models/n/infer HTTP/1.1\r\nContent-Length: 5").model == "n"
    assert len(direct._heads) <= 256


def test_all_kinds_of_requests_of_one_connection_are_answered_in_order(served):
    with connect(served) as sock:
        sock.sendall(
            request(body(1))
            + b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
            + request(b"{}")
            + request(body(2), "digits")
            + request(body(3), X_A="b")
            + b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n"
            + request(body(4), Expect="nothing")
            + request(body(5))
        )
        responses = read_responses(sock, 8)
    assert [response[0] for response in responses[:3]] == [200, 200, 400]
    assert [json.loads(responses[at][2]).get("id") for at in (0, 4, 6, 7)] == ["1", "3", "4", "5"]
    assert json.loads(responses[5][2])["name"] == "xpuruntime"
    assert all("date" in headers for _, headers, _ in responses)


@pytest.mark.parametrize("pause", [0.0, 0.2])
@pytest.mark.parametrize("at", [10, 60, 90])
def test_a_request_in_two_parts_is_answered(served, at, pause):
    made = request(body(7))
    with connect(served) as sock:
        for _ in range(2):
            sock.sendall(made[:at])
            time.sleep(pause)
            sock.sendall(made[at:])
            (answer,) = read_responses(sock, 1)
            assert answer[0] == 200
            assert json.loads(answer[2])["id"] == "7"


def test_what_follows_a_request_that_waits_is_kept_in_order(own):
    with Server(own, http="127.0.0.1:0") as server:
        served = SimpleNamespace(http=Client(server.http_address))
        with connect(served) as sock:
            sock.sendall(request(body(1), "slow") + request(body(2)))
            assert until(lambda: own.waiting)
            sock.sendall(request(body(3)) + b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
            assert served.http.get("/v2/health/live").status == 200
            assert len(own.requests) == 1
            own.release.set()
            responses = read_responses(sock, 4)
    assert [json.loads(response[2]).get("id") for response in responses[:3]] == ["1", "2", "3"]
    assert json.loads(responses[3][2]) == {"live": True}


def test_an_idle_connection_is_closed_and_one_that_waits_is_not(own):
    with Server(own, http="127.0.0.1:0", options=TransportOptions(idle_seconds=1)) as server:
        served = SimpleNamespace(http=Client(server.http_address))
        with connect(served) as idle, connect(served) as waits:
            for sock in (idle, waits):
                sock.sendall(request(body(1)))
                assert read_responses(sock, 1)[0][0] == 200
            start = time.monotonic()
            waits.sendall(request(body(2), "slow"))
            assert idle.recv(1) == b""
            assert time.monotonic() - start > 0.5
            time.sleep(1.2)
            own.release.set()
            assert read_responses(waits, 1)[0][0] == 200


@pytest.mark.parametrize("count", [20, 3000, 5000, 20_000])
def test_strings_that_take_long_to_decode_take_the_long_way(served, count):
    """They are answered as others are, also behind and before a request that is not long."""
    made, length = strings(count)
    sent = request(made, "echo", Inference_Header_Content_Length=str(length))
    with connect(served) as sock:
        sock.sendall(request(body(1)) + sent + request(body(2)))
        first, found, last = read_responses(sock, 3)
    assert [json.loads(side[2])["id"] for side in (first, last)] == ["1", "2"]
    assert (found[0], found[2][int(found[1]["inference-header-content-length"]) :]) == (200, made[length:])


def code_of(address: str, method: str, asked: dict, **metadata: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            call(encode(f"{method}Request", asked), metadata=list(metadata.items()), timeout=20)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_tokens(service):
    access = Access(token="user", admin_token="admin", repository=True)
    service.why_not_ready = "digits: private"
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0", options=TransportOptions(access=access)) as server:
        client = Client(server.http_address)
        assert client.get("/v2/health/live").status == 200
        assert client.get("/v2/health/ready").json == {"ready": False, "error": "not ready"}
        for header in ({}, {"Authorization": "Bearer admin"}, {"Authorization": "user"}, {"Authorization": "Bearer u"}):
            for path in ("/v2", "/v2/models/digits", "/v2/models/none", "/v2/models/digits/stats"):
                answer = client.get(path, **header)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert client.get("/v2", Authorization="bearer user").status == 200
        assert client.post("/v2/repository/index", b"", Authorization="Bearer user").status == 401
        assert client.post("/v2/repository/index", b"", Authorization="Bearer admin").status == 200
        ok, refused = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
        assert code_of(server.grpc_address, "ServerLive", {}) is ok
        assert code_of(server.grpc_address, "ServerMetadata", {}) is refused
        assert code_of(server.grpc_address, "ModelInfer", {}) is refused
        assert code_of(server.grpc_address, "ServerMetadata", {}, authorization="Bearer user") is ok
        assert code_of(server.grpc_address, "RepositoryIndex", {}, authorization="Bearer user") is refused
        assert code_of(server.grpc_address, "RepositoryIndex", {}, authorization="Bearer admin") is ok
    service.why_not_ready = ""


def test_a_call_without_the_token_ends_before_its_message_is_read(service):
    """The messages are never sent, so nobody can have waited for them."""
    never = threading.Event()

    def messages():
        never.wait()
        yield b""

    access = Access(token="user")
    with (
        Server(service, http=None, grpc="127.0.0.1:0", options=TransportOptions(access=access)) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        for method in METHODS:
            call = channel.stream_unary(f"/inference.GRPCInferenceService/{method}")
            if method in ("ServerLive", "ServerReady"):
                assert call(messages(), timeout=60) == b"\x08\x01"
                continue
            with pytest.raises(grpc.RpcError, match="asks for a token") as caught:
                call(messages(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            wrong = channel.stream_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError, match="a token, and another was sent"):
                wrong(messages(), timeout=60, metadata=[("authorization", "Bearer administrator")])
        never.set()


def test_the_repository_is_closed_by_default(service):
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        client = Client(server.http_address)
        before = list(service.loaded)
        for path in ("index", "models/echo/load", "models/echo/unload"):
            answer = client.post(f"/v2/repository/{path}")
            assert answer.status == 403
            assert "closed to clients" in answer.error
        for method in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"):
            assert code_of(server.grpc_address, method, {"model_name": "echo"}) is grpc.StatusCode.PERMISSION_DENIED
        assert service.loaded == before
        assert client.get("/metrics").status == 404


def test_tls_on_both_transports(service, pem):
    certificate, key = pem
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0", tls=Tls(certificate, key)) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(f"{server.url}/v2", context=trusted, timeout=20) as answer:
            assert answer.status == 200
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(server.grpc_address, credentials) as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20) == b"\x08\x01"


@pytest.mark.parametrize("broken", ["certificate", "key", "swapped"])
def test_wrong_files_of_tls_are_refused(service, pem, tmp_path, broken):
    certificate, key = pem
    (tmp_path / "none.pem").write_text("nothing")
    files = {
        "certificate": (tmp_path / "missing.pem", key),
        "key": (certificate, tmp_path / "none.pem"),
        "swapped": (key, certificate),
    }
    with pytest.raises(InputError, match="the certificate and key of TLS cannot be used"):
        Server(service, http="127.0.0.1:0", tls=Tls(*files[broken])).start()
