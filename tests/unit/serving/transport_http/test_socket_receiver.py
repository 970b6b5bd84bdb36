# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SocketReceiver` of the core: whole bodies, parts of them, and sockets and receivers that end in between."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import numpy as np
import pytest

from xpuruntime import _core
from xpuruntime.errors import InputError


@pytest.fixture
def receiver():
    made = _core.SocketReceiver(2)
    yield made
    made.close()


def ended(receiver: _core.SocketReceiver, count: int, seconds: float = 20.0) -> dict[object, object]:
    """Return how many bytes came for each owner."""
    found: dict[object, object] = {}
    until = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        if select.select([receiver.fileno()], [], [], 0.2)[0]:
            found.update(receiver.received())
    return found


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
