# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Load on one HTTP route over raw sockets, in a closed loop, with every answer checked."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CLOSED", "Connection", "Load", "Requests", "ask", "closed_loop"]

#: Seconds that answers are waited for once no request is sent any more; what has none by then is lost.
_PATIENCE = 10.0
CLOSED = b"closed"


@dataclass
class Requests:
    """Requests of one route with the outputs that they must have.

    Parameters
    ----------
    port : int
    sent : list of bytes
        Whole HTTP requests, sent in turns.
    expected : numpy.ndarray
        The right output of each.
    read : callable
        From head and body of a response to its output.
    """

    port: int
    sent: list[bytes]
    expected: np.ndarray
    read: Callable[[bytes, bytes], np.ndarray]

    def right(self, index: int, head: bytes, body: bytes) -> bool:
        """Return whether a response has the output of its request."""
        found = self.read(head, body).reshape(-1)
        expected = self.expected[index]
        return found.size == expected.size and float(np.abs(found - expected).max()) < 1e-3


@dataclass
class Load:
    """What happened under a load: latencies of right answers in seconds, and how many had none or a wrong one."""

    latencies: list[float] = field(default_factory=list)
    lost: int = 0
    wrong: int = 0
    seconds: float = 0.0

    def to_plain(self) -> dict[str, float | int]:
        """Return rate, quantiles in milliseconds and counts."""
        taken = sorted(self.latencies)
        found: dict[str, float | int] = {"answered": len(taken), "lost": self.lost, "wrong": self.wrong}
        if taken:
            found["per_second"] = len(taken) / self.seconds
            for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
                found[name] = taken[min(len(taken) - 1, int(share * len(taken)))] * 1e3
        return found


class Connection:
    """A connection with one request on it at a time."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.index, self.since = 0, 0.0
        self.open()

    def open(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.requests.port), timeout=_PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""

    def send(self, index: int, since: float) -> None:
        self.index, self.since, self.received = index, since, b""
        self.socket.sendall(self.requests.sent[index])

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return head and body of the response once it is whole."""
        part = self.socket.recv(1 << 20)
        if not part:
            return CLOSED, b""
        self.received += part
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found:
            return None
        head = head.lower()
        _, stated, rest = head.partition(b"\r\ncontent-length: ")
        if stated:
            return (head, body) if len(body) >= int(rest.partition(b"\r\n")[0]) else None
        return (head, _unchunked(body)) if body.endswith(b"\r\n0\r\n\r\n") else None


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        body = rest[length + 2 :]
        if not length:
            break
    return b"".join(parts)


def ask(requests: Requests) -> bool:
    """Send one request, and return whether its answer is right; raises where there is no server."""
    one = Connection(requests)
    one.send(0, 0.0)
    while (found := one.receive()) is None:
        continue
    one.socket.close()
    return found[0].startswith(b"http/1.1 200 ") and requests.right(0, *found)


class _Clients:
    """Connections that are waited for together."""

    def __init__(self, requests: Requests, count: int) -> None:
        self.requests, self.load = requests, Load()
        self.selector = selectors.DefaultSelector()
        self.idle: deque[Connection] = deque()
        self.busy: set[Connection] = set()
        self.next = 0
        for _ in range(count):
            one = Connection(requests)
            self.selector.register(one.socket, selectors.EVENT_READ, one)
            self.idle.append(one)

    def send(self) -> None:
        """Send the next request on an idle connection."""
        one = self.idle.popleft()
        self.busy.add(one)
        try:
            one.send(self.next, time.perf_counter())
        except OSError:
            self._again(one)
        self.next = (self.next + 1) % len(self.requests.sent)

    def wait(self, timeout: float) -> None:
        """Take what has come."""
        for key, _ in self.selector.select(timeout):
            one: Connection = key.data
            try:
                found = one.receive()
            except OSError:
                found = CLOSED, b""
            if found is None:
                continue
            if found[0] is CLOSED:
                self._again(one)
                continue
            now = time.perf_counter()
            if not found[0].startswith(b"http/1.1 200 "):
                self.load.lost += 1
            elif self.requests.right(one.index, *found):
                self.load.latencies.append(now - one.since)
            else:
                self.load.wrong += 1
            self.busy.remove(one)
            self.idle.append(one)

    def _again(self, one: Connection) -> None:
        """Open a connection anew that was closed; a request on it is lost."""
        if one in self.busy:
            self.busy.remove(one)
            self.load.lost += 1
        self.selector.unregister(one.socket)
        one.socket.close()
        one.open()
        self.selector.register(one.socket, selectors.EVENT_READ, one)
        if one not in self.idle:
            self.idle.append(one)

    def finish(self, start: float) -> Load:
        """Wait for the answers that are missing."""
        self.load.seconds = time.perf_counter() - start
        end = time.perf_counter() + _PATIENCE
        within = len(self.load.latencies)
        while self.busy and time.perf_counter() < end:
            self.wait(0.1)
        del self.load.latencies[within:]  # they came after the time, and count neither as answered nor as lost
        self.load.lost += len(self.busy)
        for one in [*self.idle, *self.busy]:
            one.socket.close()
        self.selector.close()
        return self.load


def closed_loop(requests: Requests, clients: int, seconds: float) -> Load:
    """Send the next request of each client once it has its answer."""
    made = _Clients(requests, clients)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        while made.idle:
            made.send()
        made.wait(0.5)
    return made.finish(start)
