# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""HTTP client of the tests, and waiting for what threads do."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from served_models import Service


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]


class Client:
    """HTTP client that returns status, headers and body."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)

    def __call__(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self("GET", path, headers=headers)

    def post(self, path: str, body: Any = b"", **headers: str) -> Answer:
        return self("POST", path, body, headers)


class Served(NamedTuple):
    service: Service
    server: Any
    http: Client


def until(condition: Callable[[], Any], seconds: float = 20) -> bool:
    """Wait for a condition, and return whether it came."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


#: Sends requests over three connections and halves of them over a fourth, again and again.
_CLIENT = """
import socket, sys
request = bytes.fromhex(sys.argv[2])
socks = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(4)]
while True:
    for at, sock in enumerate(socks):
        sock.sendall(request[: len(request) // (2 if at == 3 else 1)])
    print("sent", flush=True)
    for sock in socks[:3]:
        sock.recv(65536)
    socks[3].close()
    socks[3] = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
"""


def kill_a_client(port: int, request: bytes, seconds: float) -> None:
    """Start a process that sends a request again and again, and kill it so long after its first ones."""
    command = [sys.executable, "-I", "-S", "-c", _CLIENT, str(port), request.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"sent\n"
        time.sleep(seconds)
        client.kill()
