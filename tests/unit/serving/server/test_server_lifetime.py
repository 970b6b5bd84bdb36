# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Servers: their sessions, addresses and lifetime."""

from __future__ import annotations

import socket
import sys
import threading
import time

import numpy as np
import pytest
from served_models import Service
from serving_clients import Client, until

import xpuruntime as xrt
from xpuruntime.errors import EngineUnavailable, InputError, XpuRuntimeError
from xpuruntime.serving import Server, ServeSettings
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.protocol.infer_messages import read_infer_response, write_infer_request
from xpuruntime.serving.transport.options import TransportOptions

pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
grpc = pytest.importorskip("grpc", reason="needs grpc, of the extra serve")


REQUEST = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}


@pytest.fixture
def own():
    service = Service()
    yield service
    service.close()


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
        with pytest.raises(XpuRuntimeError, match=f"{address} cannot be listened on.* write {transport} 127.0.0.1:0"):
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
    with pytest.raises(EngineUnavailable, match=r"needs the package uvicorn.*Fix: `pip install .*uvicorn"):
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
    assert [answer.status for answer in answers] == [200]
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


INFER = "/inference.GRPCInferenceService/ModelInfer"


def images(count: int) -> np.ndarray:
    return xrt.demo_images()[0][:count]


def asked(array: np.ndarray) -> dict:
    return {
        "inputs": [{"name": "image", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}]
    }


def settings(**model: object) -> ServeSettings:
    model = {"source": str(xrt.demo_model_path()), **model}
    return ServeSettings.coerce(
        {
            "schema": "xpuruntime.serve/1",
            "http": {"listen": "127.0.0.1:0"},
            "grpc": {"listen": "127.0.0.1:0"},
            "metrics": {"dialect": ["xrt", "triton"]},
            "models": {"digits": model},
        }
    )


def test_an_open_session_is_served_on_both_transports_and_stays_open():
    made = images(3)
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
        expected = session.run({"image": made})["logits"]
        with Server({"digits": session}, http="127.0.0.1:0", grpc="127.0.0.1:0") as server:
            client = Client(server.http_address)
            answer = client.post("/v2/models/digits/infer", asked(made)).json["outputs"][0]
            np.testing.assert_array_equal(np.array(answer["data"], np.float32).reshape(3, 10), expected)
            with grpc.insecure_channel(server.grpc_address) as channel:
                request = InferRequest("digits", [InferTensor("image", "FP32", made.shape, made)])
                sent = channel.unary_unary(INFER)(write_infer_request(request), timeout=20)
            np.testing.assert_array_equal(read_infer_response(sent).outputs[0].data, expected)
            extensions = client.get("/v2").json["extensions"]
            assert "binary_tensor_data" in extensions
            assert "model_repository" not in extensions
        session.run({"image": made})


def test_metrics_status_and_evidence():
    pytest.importorskip("prometheus_client", reason="needs prometheus-client, of the extra serve")
    with Server.from_settings(settings()) as server:
        client = Client(server.http_address)
        assert client.post("/v2/models/digits/infer", asked(images(2))).status == 200
        metrics = client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert b'nv_inference_request_success{model="digits",version="1"} 1.0' in metrics.body
        page = client.get("/status")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert b"digits" in page.body
        assert client.get("/v2/models/digits/evidence").json["execution_hash"].startswith("sha256:")
        assert client.get("/v2/models/digits/lock").status == 404
        evidence = {**asked(images(2)), "parameters": {"xrt_evidence": True}}
        assert client.post("/v2/models/digits/infer", evidence).json["parameters"]["xrt_batch_size"] >= 1


def test_a_model_that_does_not_load_is_not_ready(tmp_path):
    with Server.from_settings(settings(source=str(tmp_path / "missing.onnx"))) as server:
        client = Client(server.http_address)
        answer = client.get("/v2/health/ready")
        assert answer.status == 503
        assert "missing.onnx" in answer.error
        assert client.get("/v2/health/live").status == 200
        assert client.post("/v2/models/digits/infer", asked(images(1))).status == 503
