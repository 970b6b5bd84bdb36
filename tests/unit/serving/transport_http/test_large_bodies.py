# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Large bodies: buffers of their own, threads of the core that fill them, and everything around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import threading
import time

import numpy as np
import pytest
from served_models import Service
from serving_clients import until

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.serving import server as server_module
from xpuruntime.serving.http.bodies import BodyReceiver
from xpuruntime.serving.http.connections import Connection
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.protocol.rest import write_request
from xpuruntime.serving.server import Server
from xpuruntime.serving.transport.gate import Access
from xpuruntime.serving.transport.options import Tls, TransportOptions

pytest.importorskip("uvicorn", reason="needs uvicorn, of the extra serve")
pytest.importorskip("httptools", reason="needs httptools, of the extra serve")


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
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(1)
        assert part, data
        data += part
    lines = data.decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
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
    assert sum(array.ctypes.data % 64 == 0 for array in arrays) >= sum(map(whole, receivers))
    assert not any(array.flags.writeable for array in arrays)


def test_little_of_a_large_body_is_received_before_others_have_their_turn(own, monkeypatch):
    """A socket has megabytes of it, and libuv reads on as long as it has."""
    parts, turns = [], [0]
    updated = BodyReceiver.buffer_updated

    def buffer_updated(self, nbytes):
        parts.append((nbytes, turns[0]))
        self._loop.call_soon(lambda: turns.__setitem__(0, turns[0] + 1))
        updated(self, nbytes)

    monkeypatch.setattr(BodyReceiver, "buffer_updated", buffer_updated)
    monkeypatch.setattr(server_module, "default_threads", lambda: 0)
    array = values(1, 6_000_000)
    with serving(own) as server, connect(server) as sock:
        sender = threading.Thread(target=sock.sendall, args=(request(array) + HEALTH,))
        sender.start()
        assert_echo(read_answer(sock), array)
        assert read_answer(sock)[0] == 200
        sender.join()
    assert max(size for size, _ in parts) <= 256 << 10
    full = [turn for size, turn in parts if size == 256 << 10]
    assert len(full) > 5
    assert len(set(full)) == len(full)


def test_what_follows_a_large_body_is_answered_behind_it(own, loops, receivers):
    arrays = [values(at, size) for at, size in enumerate((100_000, 3, 50_000, 200_000, 5))]
    with serving(own) as server, connect(server) as sock:
        sender = threading.Thread(target=sock.sendall, args=(b"".join(map(request, arrays)),))
        sender.start()
        for array in arrays:
            assert_echo(read_answer(sock), array)
        sender.join()
    assert receivers


def test_a_long_response_is_copied_as_its_client_takes_it(own, loops, monkeypatch):
    """All of it at once would hold the event loop."""
    left = []
    pause_writing = Connection.pause_writing

    def paused(self):
        left.append(self.transport.get_write_buffer_size())
        pause_writing(self)

    monkeypatch.setattr(Connection, "pause_writing", paused)
    array = values(1, 6_000_000)
    with serving(own) as server, connect(server) as sock:
        sock.sendall(request(array) + HEALTH)
        assert until(lambda: left)
        assert_echo(read_answer(sock), array)
        assert read_answer(sock)[0] == 200
    assert max(left) <= 512 << 10


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


@pytest.mark.parametrize("count", [COUNT, 300], ids=["large", "small"])
def test_a_body_that_comes_too_slowly_is_refused(own, loops, receivers, count):
    with serving(own, body_seconds=0.3) as server, connect(server) as sock:
        sock.sendall(request(values(1, count))[:1000])  # which is taken for slow only after more than came pays for
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


def test_a_connection_is_not_idle_while_a_body_comes(own, receivers):
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


@pytest.fixture
def receiver():
    made = _core.SocketReceiver(2)
    yield made
    made.close()


def ended(receiver: _core.SocketReceiver, count: int, seconds: float = 20.0) -> dict[object, object]:
    """Return how many bytes came for each owner."""
    results: dict[object, object] = {}
    until = time.monotonic() + seconds
    while len(results) < count and time.monotonic() < until:
        if select.select([receiver.fileno()], [], [], 0.2)[0]:
            results.update(receiver.received())
    return results


def test_bodies_of_many_sockets_are_whole_and_no_byte_more(receiver):
    draw = np.random.default_rng(0)
    bodies = [draw.integers(0, 256, int(draw.integers(0, 3_000_000)), np.uint8) for _ in range(12)]
    pairs = [socket.socketpair() for _ in bodies]
    buffers = [np.full(len(body) + 16, 7, np.uint8) for body in bodies]
    senders = [threading.Thread(target=pair[0].sendall, args=(body.tobytes() + b"next",)) for pair, body in
               zip(pairs, bodies, strict=True)]  # fmt: skip
    for number, (pair, buffer, body) in enumerate(zip(pairs, buffers, bodies, strict=True)):
        receiver.receive(number, pair[1].fileno(), buffer.data[: len(body)], 20.0)
    for one in senders:
        one.start()
    assert ended(receiver, len(bodies)) == {number: len(body) for number, body in enumerate(bodies)}
    for pair, buffer, body, sender in zip(pairs, buffers, bodies, senders, strict=True):
        sender.join()
        assert np.array_equal(buffer[: len(body)], body)
        assert (buffer[len(body) :] == 7).all()
        assert pair[1].recv(100) == b"next"
        for one in pair:
            one.close()


def test_what_comes_too_slowly_or_not_at_all_is_handed_back(receiver):
    buffers = {name: np.zeros(10, np.uint8) for name in ("slow", "closed", "reset")}
    pairs = {name: socket.socketpair() for name in buffers}
    began = time.monotonic()
    for name, buffer in buffers.items():
        pairs[name][0].sendall(b"abc")
        receiver.receive(name, pairs[name][1].fileno(), buffer.data, 0.05)
    for name in ("closed", "reset"):
        pairs[name][0].close()
    assert ended(receiver, 3) == {"slow": 3, "closed": 3, "reset": 3}
    assert time.monotonic() - began > 0.045
    assert all(bytes(buffer[:4]) == b"abc\0" for buffer in buffers.values())
    pairs["slow"][0].sendall(b"defg")
    assert pairs["slow"][1].recv(100) == b"defg", "the rest is the caller's"
    for pair in pairs.values():
        for one in pair:
            one.close()


def test_a_socket_that_is_closed_meanwhile_is_read_to_its_end(receiver):
    """Its number may be another file's by then."""
    mine, other = socket.socketpair()
    buffer = np.zeros(6, np.uint8)
    receiver.receive("body", mine.fileno(), buffer.data, 20.0)
    number = mine.fileno()
    mine.close()
    file = os.open(os.devnull, os.O_RDONLY)
    if file != number:
        os.dup2(file, number)
        os.close(file)
    other.sendall(b"abcdef")
    assert ended(receiver, 1) == {"body": 6}
    os.close(number)
    assert bytes(buffer) == b"abcdef"
    other.close()


def test_a_receiver_that_is_closed_writes_no_more():
    mine, other = socket.socketpair()
    receiver = _core.SocketReceiver(1)
    buffer = np.zeros(4, np.uint8)
    receiver.receive("body", mine.fileno(), buffer.data, 20.0)
    receiver.close()
    receiver.close()
    other.sendall(b"abcd")
    time.sleep(0.02)
    assert not buffer.any()
    assert receiver.received() == []
    with pytest.raises(InputError, match="receiver is closed"):
        receiver.receive("body", mine.fileno(), buffer.data, 1.0)
    assert mine.recv(10) == b"abcd"
    mine.close()
    other.close()


def test_what_is_no_socket_or_no_buffer_is_refused(receiver):
    mine, other = socket.socketpair()
    with pytest.raises(InputError, match=r"socket -1 cannot be received from.*Fix"):
        receiver.receive("body", -1, bytearray(4), 1.0)
    with pytest.raises((BufferError, ValueError), match=r"read-only|writable"):
        receiver.receive("body", mine.fileno(), b"abcd", 1.0)
    with pytest.raises(InputError, match="not contiguous"):
        receiver.receive("body", mine.fileno(), memoryview(bytearray(8))[::2], 1.0)
    mine.close()
    other.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_of_a_fork_ends_with_a_receiver_of_its_parent(receiver):
    mine, other = socket.socketpair()
    buffer = np.zeros(4, np.uint8)
    receiver.receive("body", mine.fileno(), buffer.data, 20.0)
    child = os.fork()
    if child == 0:
        receiver.close()
        os._exit(0)
    until = time.monotonic() + 120
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert status == (child, 0)
    other.sendall(b"abcd")
    assert ended(receiver, 1) == {"body": 4}
    mine.close()
    other.close()
