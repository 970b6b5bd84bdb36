# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Large bodies of plain requests are received into a buffer of their own, and everything around them stays as it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time

import numpy as np
import pytest
from served_models import Service
from serving_clients import until

pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
pytest.importorskip("httptools", reason="needs httptools, of the extra serve")

from xpuruntime.serving import server as server_module
from xpuruntime.serving.http.bodies import BodyReceiver
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.options import Access, Tls, TransportOptions
from xpuruntime.serving.protocol.rest import write_request
from xpuruntime.serving.server import Server

COUNT = 60_000
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"


def values(seed: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def request(array: np.ndarray, model: str = "two.words-x_1", **headers: str) -> bytes:
    body, length = write_request(InferRequest(model, [InferTensor("x", "FP32", array.shape, array)]), binary=True)
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: a", f"Content-Length: {len(body)}"]
    lines += [f"Inference-Header-Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def connect(server: Server) -> socket.socket:
    host, _, port = server.http_address.removeprefix("http://").removeprefix("https://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(1)
        assert part, data
        data += part
    lines = data.decode().strip().split("\r\n")
    headers = dict(one.lower().split(": ", 1) for one in lines[1:])
    left, body = int(headers["content-length"]), b""
    while len(body) < left:
        part = sock.recv(left - len(body))
        assert part, (len(body), left)
        body += part
    return int(lines[0].split()[1]), headers, body


def assert_echo(answer: tuple[int, dict[str, str], bytes], array: np.ndarray) -> None:
    status, headers, body = answer
    assert status == 200, body
    found = np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)
    np.testing.assert_array_equal(found, array)


@pytest.fixture(params=["asyncio", "uvloop", "threads of uvloop"])
def loops(request, monkeypatch):
    if "uvloop" in request.param:
        pytest.importorskip("uvloop", reason="needs uvloop, of the extra serve")
    else:
        monkeypatch.setattr(server_module, "_new_loop", asyncio.new_event_loop)
    monkeypatch.setattr(server_module, "default_threads", lambda: 2 if "threads" in request.param else 0)
    return request.param


def whole(receiver: BodyReceiver) -> bool:
    return receiver._received == receiver.head.length


@contextlib.contextmanager
def serving(service: Service, **options):
    with Server(service, http="127.0.0.1:0", options=TransportOptions(**options)) as server:
        yield server


@pytest.mark.parametrize("seed", range(4))
def test_bodies_in_pieces_of_any_size_are_whole(own, loops, receivers, seed):
    draw = np.random.default_rng(seed)
    with serving(own) as server, connect(server) as sock:
        for number in range(6):
            array = values(number, int(draw.integers(20_000, 300_000)))
            left = memoryview(request(array))
            while left:
                size = int(draw.choice([1, 100, 4096, 70_000, 1 << 20]))
                sock.sendall(left[:size])
                left = left[size:]
                time.sleep(float(draw.choice([0, 0.002])))
            assert_echo(read_answer(sock), array)
    assert any(map(whole, receivers)), "none took the way that is tested here"
    arrays = [one.inputs[0].data for one in own.requests]
    assert sum(one.ctypes.data % 64 == 0 for one in arrays) >= sum(map(whole, receivers))
    assert not any(one.flags.writeable for one in arrays)


def test_what_follows_a_large_body_is_answered_behind_it(own, loops, receivers):
    arrays = [values(at, size) for at, size in enumerate((100_000, 3, 50_000, 200_000, 5))]
    with serving(own) as server, connect(server) as sock:
        sender = threading.Thread(target=sock.sendall, args=(b"".join(map(request, arrays)),))
        sender.start()
        for array in arrays:
            assert_echo(read_answer(sock), array)
        sender.join()
    assert receivers


def test_a_large_request_that_waits_is_answered_later_and_others_behind_it(own, loops, receivers):
    first, second = values(1), values(2)
    with serving(own) as server, connect(server) as sock:
        sock.sendall(request(first, "slow"))
        assert until(lambda: own.waiting)
        sender = threading.Thread(target=sock.sendall, args=(request(second),))
        sender.start()
        time.sleep(0.1)
        assert len(own.requests) == 1
        own.release.set()
        assert_echo(read_answer(sock), first)
        assert_echo(read_answer(sock), second)
        sender.join()
    assert receivers


def test_a_client_that_goes_in_the_middle_leaves_nothing(own, loops, receivers):
    made = request(values(1))
    with serving(own, drain_seconds=20) as server:
        for part in (70_000, len(made) - 1):
            with connect(server) as sock:
                sock.sendall(made[:part])
                assert until(lambda least=part - 500: receivers and receivers[-1]._received >= least)
        budget = receivers[-1].held._budget
        assert until(lambda: budget.used == 0)
        assert not own.requests
        began = time.monotonic()
    assert time.monotonic() - began < 10, "the server has not waited for them"


def test_a_body_that_comes_too_slowly_is_refused(own, loops, receivers):
    with serving(own, body_seconds=0.3) as server, connect(server) as sock:
        sock.sendall(request(values(1))[:1000])  # which is taken for slow only after more than came pays for
        status, headers, body = read_answer(sock)
        assert (status, headers["connection"]) == (408, "close")
        assert b"too slowly" in body
        assert sock.recv(1) == b""
        assert receivers[0].held._budget.used == 0


def test_bodies_of_all_requests_together_are_bounded(own, loops, receivers):
    made = request(values(1))
    with serving(own, max_buffered=len(made) + 1000) as server, connect(server) as first, connect(server) as second:
        first.sendall(made[:-10])
        assert until(lambda: receivers and receivers[0]._received > len(made) - 500)
        second.sendall(made)  # all of it: the server takes what it refuses, and its response is not lost
        status, headers, _ = read_answer(second)
        assert status == 429
        assert "retry-after" in headers
        first.sendall(made[-10:])
        assert_echo(read_answer(first), values(1))


def test_a_wrong_token_is_refused_before_the_body(own, loops, receivers):
    options = {"access": Access(token="0123456789abcdef")}
    with serving(own, **options) as server:
        with connect(server) as sock:
            sock.sendall(request(values(1))[:70_000])
            assert read_answer(sock)[0] == 401
        assert not receivers
        with connect(server) as sock:
            sock.sendall(request(values(1), Authorization="Bearer 0123456789abcdef"))
            assert_echo(read_answer(sock), values(1))
    assert receivers


def test_a_server_that_stops_waits_for_a_body_and_then_no_longer(own, loops, receivers):
    made = request(values(1))
    with serving(own, drain_seconds=1.0) as server, connect(server) as whole, connect(server) as half:
        for sock in (whole, half):
            sock.sendall(made[:-10])
        assert until(lambda: len(receivers) == 2 and all(one._received > len(made) - 500 for one in receivers))
        stopping = threading.Thread(target=server.close)
        stopping.start()
        time.sleep(0.3)
        whole.sendall(made[-10:])
        assert_echo(read_answer(whole), values(1))
        assert read_answer(half)[0] == 503
        stopping.join()


def test_a_connection_is_not_idle_while_a_body_comes(own, loops, receivers):
    made = request(values(1))
    with serving(own, idle_seconds=1) as server, connect(server) as sock:
        for _ in range(2):
            sock.sendall(made[:-10])
            time.sleep(1.6)
            sock.sendall(made[-10:])
            assert_echo(read_answer(sock), values(1))
    assert sum(map(whole, receivers)) == 2


def test_large_bodies_over_tls(own, loops, pem):
    certificate, key = pem
    with Server(own, http="127.0.0.1:0", tls=Tls(certificate, key)) as server, connect(server) as plain:
        context = ssl.create_default_context(cafile=certificate)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            for number in range(3):
                array = values(number, 200_000)
                sock.sendall(request(array))
                assert_echo(read_answer(sock), array)


def test_other_requests_in_between_are_answered_in_their_order(own, loops):
    """Another length, a small one, another path, and all of them at once."""
    arrays = [values(1), values(2, 70_000), values(3, 3), values(4), values(5), values(6, 90_000)]
    with serving(own) as server, connect(server) as sock:
        for array in arrays:
            sock.sendall(request(array))
            assert_echo(read_answer(sock), array)
        for _ in range(2):
            sock.sendall(HEALTH)
            assert read_answer(sock)[0] == 200
        sender = threading.Thread(target=sock.sendall, args=(b"".join(map(request, arrays)) + HEALTH,))
        sender.start()
        for array in arrays:
            assert_echo(read_answer(sock), array)
        assert read_answer(sock)[0] == 200
        sender.join()


def test_clients_beside_each_other_get_their_own_answers(own, loops):
    failures: list[BaseException] = []

    def client(first: int) -> None:
        try:
            with connect(server) as sock:
                for seed in range(first, first + 12):
                    sock.sendall(request(values(seed)))
                    assert_echo(read_answer(sock), values(seed))
        except BaseException as error:
            failures.append(error)

    with serving(own) as server:
        clients = [threading.Thread(target=client, args=(100 * at,)) for at in range(6)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
    assert not failures
