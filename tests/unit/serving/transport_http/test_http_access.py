# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tokens, closed repositories and TLS: what is shut is shut on both transports."""

from __future__ import annotations

import ssl
import threading
import urllib.request

import pytest
from serving_clients import Client

from xpuruntime.errors import InputError
from xpuruntime.serving.options import Access, Tls, TransportOptions

grpc = pytest.importorskip("grpc", reason="needs grpc, of the extra serve")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")

from xpuruntime.serving.protocol.grpc_messages import METHODS, encode  # noqa: E402
from xpuruntime.serving.server import Server  # noqa: E402


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
