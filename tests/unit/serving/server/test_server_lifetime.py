# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A server starts where it can, tells where it listens, and answers what it accepted before it stops."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest
from served_models import Service
from serving_clients import Client, until

from xpuruntime.errors import EngineUnavailable, InputError, XpuRuntimeError
from xpuruntime.serving.options import TransportOptions

pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
pytest.importorskip("grpc", reason="needs grpc, of the extra serve")

from xpuruntime.serving.server import Server

REQUEST = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}


@pytest.fixture
def own():
    made = Service()
    yield made
    made.close()


def test_ports_are_known_and_free_again(service):
    with Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        ports = [int(address.rpartition(":")[2]) for address in (server.http_address, server.grpc_address)]
        assert all(ports)
        assert server.url == f"http://{server.http_address}"
    for port in ports:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_one_transport_alone(service, transport):
    with Server(service, **{"http": None, "grpc": None, transport: "127.0.0.1:0"}) as server:
        assert bool(server.http_address) is (transport == "http")
        assert bool(server.grpc_address) is (transport == "grpc")


def test_ipv6(service):
    try:
        with Server(service, http="[::1]:0") as server:
            assert server.url.startswith("http://[::1]:")
            assert Client(f"::1:{server.http_address.rpartition(':')[2]}").get("/v2").status == 200
    except XpuRuntimeError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_an_address_in_use_is_refused_with_it(service, transport):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(XpuRuntimeError, match=f"{transport} {address} cannot be listened on"):
            Server(service, **{"http": None, transport: address}).start()


@pytest.mark.parametrize("address", ["", "8000", "localhost", "localhost:99999", "a b:1", ":80", "http://a:1"])
def test_what_is_no_address_is_refused(service, address):
    with pytest.raises(InputError, match="write HOST:PORT"):
        Server(service, http=address)


@pytest.mark.parametrize("grpc", ["127.0.0.1", "localhost", "0.0.0.0", "*"])
def test_two_listeners_of_one_address_are_refused(service, grpc):
    with pytest.raises(InputError, match=r"http 127\.0\.0\.1:8000 and grpc .*:8000 are the same address. Fix"):
        Server(service, http="127.0.0.1:8000", grpc=f"{grpc}:8000")
    Server(service, http="127.0.0.1:8000", grpc="127.0.0.2:8000").close()
    Server(service, http="127.0.0.1:0", grpc=f"{grpc}:0").close()


def test_an_unknown_host_is_refused(service):
    with pytest.raises(XpuRuntimeError, match="cannot be listened on"):
        Server(service, http="no-such-host.invalid:0").start()


def test_a_missing_package_is_named_with_its_command(service, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(EngineUnavailable, match=r"needs the package uvicorn.*Fix: pip install .*uvicorn"):
        Server(service, http="127.0.0.1:0").start()


def test_a_server_that_stops_answers_what_it_accepted(own):
    server = Server(own, http="127.0.0.1:0", grpc="127.0.0.1:0").start()
    client = Client(server.http_address)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.post("/v2/models/slow/infer", REQUEST)))
    asking.start()
    assert until(lambda: own.waiting)
    held = socket.create_connection((client.host, client.port), timeout=20)
    closing = threading.Thread(target=server.close)
    closing.start()
    assert until(lambda: client.get("/v2/health/ready").status == 503)
    refused = client.post("/v2/models/two.words-x_1/infer", REQUEST)
    assert refused.status == 503
    assert refused.headers["connection"] == "close"
    assert "retry-after" in refused.headers
    assert client.get("/v2/health/live").status == 200
    assert not answers
    own.release.set()
    asking.join(20)
    closing.join(20)
    held.close()
    assert not closing.is_alive()
    assert [one.status for one in answers] == [200]
    with pytest.raises(ConnectionRefusedError):
        client.get("/v2")


def test_a_request_that_never_ends_does_not_keep_a_server(own):
    options = TransportOptions(drain_seconds=0.2)
    server = Server(own, http="127.0.0.1:0", options=options).start()
    client = Client(server.http_address)
    with socket.create_connection((client.host, client.port), timeout=20) as sock:
        body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}'
        sock.sendall(b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert until(lambda: own.waiting)
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 20
        assert own.waiting[0].cancelled()


def test_closing_twice_and_before_the_start(service):
    server = Server(service, http="127.0.0.1:0")
    server.close()
    server.start()
    server.close()
    server.close()
    with pytest.raises(XpuRuntimeError, match="was started before"):
        server.start()
    assert not [one for one in threading.enumerate() if one.name == "xrt-serve"]
