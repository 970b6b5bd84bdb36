# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Clients that misbehave: slow, half closed, lying, gone, or a thousand of them. The server answers the next one."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time

import pytest
from serving_clients import until

REQUEST = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}).encode()


def connect(served) -> socket.socket:
    made = socket.create_connection((served.http.host, served.http.port), timeout=20)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def head(length: int | str, path: str = "/v2/models/two.words-x_1/infer", **more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def read_all(sock: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            return found
        if not part:
            return found
        found += part


def alive(served) -> None:
    assert served.http.get("/v2/health/ready").status == 200


def test_a_head_that_does_not_come_is_not_waited_for(served):
    with connect(served) as silent, connect(served) as slow:
        slow.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost:")
        for sock in (silent, slow):
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'{"error":"the head of a request did not come within 1.5 s' in answer
    alive(served)


def test_a_head_that_drips_is_not_waited_for(served):
    with connect(served) as sock:
        sock.sendall(b"GET /v2 HTTP/1.1\r\n")
        sock.settimeout(0.1)
        start = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - start < 20:
            try:
                sock.sendall(b"X-A: b\r\n")
                answer = sock.recv(65536)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")
    alive(served)


def test_a_body_that_drips_is_not_waited_for(served):
    with connect(served) as sock:
        sock.sendall(head(1000) + b"{")
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body came too slowly: 1 bytes" in answer
    alive(served)


@pytest.mark.parametrize("stated", ["-1", "1e3", "99999999999999999999999999", "12, 13", "abc"])
def test_lengths_that_are_none_are_refused(served, stated):
    with connect(served) as sock:
        sock.sendall(head(stated) + REQUEST)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":' in answer
    alive(served)


def test_a_length_beyond_the_limit_is_refused_before_the_body(served):
    with connect(served) as sock:
        sock.sendall(head(1 << 40))
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"longer than 4194304 bytes" in answer
    assert b"connection: close" in answer
    alive(served)


def test_chunks_beyond_the_limit_are_refused(served):
    with connect(served) as sock:
        sock.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        answer = b""
        with contextlib.suppress(OSError):  # it may be closed on us meanwhile
            for _ in range(6):
                sock.sendall(chunk)
        with contextlib.suppress(OSError):
            answer = sock.recv(65536)
        assert answer[:13] in (b"HTTP/1.1 413 ", b"")
    alive(served)


def test_a_length_shorter_than_the_body_makes_no_request_of_the_rest(served):
    with connect(served) as sock:
        sock.sendall(head(len(REQUEST) - 5) + REQUEST)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    alive(served)


def test_two_lengths_are_refused(served):
    with connect(served) as sock:
        sock.sendall(head(len(REQUEST), Content_Length="3") + REQUEST)
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")
    with connect(served) as sock:
        sock.sendall(head(len(REQUEST), Transfer_Encoding="chunked") + REQUEST)
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")
    alive(served)


def test_a_long_head_is_refused(served):
    with connect(served) as sock:
        sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 30_000 + b"\r\nX-B: " + b"a" * 36_000)
        sock.sendall(b"\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")
    alive(served)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"GARBAGE\r\n\r\n", b"GET /v2 HTTP/9.9\r\n\r\n", bytes(200)]
)
def test_what_is_not_http_is_refused(served, garbage):
    with connect(served) as sock:
        sock.sendall(garbage)
        assert read_all(sock)[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 408 ")
    alive(served)


def test_a_bomb_is_refused(served):
    bomb = gzip.compress(bytes(32 << 20))
    answer = served.http.post("/v2/models/echo/infer", bomb, **{"Content-Encoding": "gzip"})
    assert answer.status == 413
    assert "as gzip is undone" in answer.error
    alive(served)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_is_gone_takes_its_request_out_of_the_queue(served, how):
    before = len(served.service.waiting)
    answered = served.service.answered
    sock = connect(served)
    sock.sendall(head(len(REQUEST), "/v2/models/slow/infer") + REQUEST)
    assert until(lambda: len(served.service.waiting) > before)
    if how == "half":
        sock.shutdown(socket.SHUT_WR)
    else:
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    assert until(served.service.waiting[-1].cancelled)
    sock.close()
    assert served.service.answered == answered
    alive(served)


def test_a_client_that_is_gone_within_its_body_makes_no_request(served):
    before = len(served.service.requests)
    with connect(served) as sock:
        sock.sendall(head(len(REQUEST)) + REQUEST[:10])
    alive(served)
    assert len(served.service.requests) == before


def test_requests_of_one_connection_are_answered_in_order(served):
    with connect(served) as sock:
        bodies = [REQUEST.replace(b"{", b'{"id": "%d", ' % at, 1) for at in range(20)]
        sock.sendall(b"".join(head(len(body)) + body for body in bodies))
        found = b""
        while found.count(b'"id":"') < 20:
            part = sock.recv(65536)
            assert part
            found += part
    ids = [part.split(b'"')[0] for part in found.split(b'"id":"')[1:]]
    assert ids == [str(at).encode() for at in range(20)]


def test_a_client_may_wait_for_leave_to_send_its_body(served):
    with connect(served) as sock:
        sock.sendall(head(len(REQUEST), Expect="100-continue"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 100 ")
        sock.sendall(REQUEST)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_thousand_connections_are_served(served):
    resource = pytest.importorskip("resource", reason="needs limits of POSIX")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        if hard != resource.RLIM_INFINITY and hard < 4096:
            pytest.skip(f"this process may open {hard} files only")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    socks = []
    try:
        for _ in range(1000):
            socks.append(connect(served))
            socks[-1].sendall(head(len(REQUEST)) + REQUEST)
        for sock in socks:
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
    finally:
        for sock in socks:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    alive(served)
