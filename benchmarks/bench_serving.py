# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a server adds to `session.run`, on a model that computes almost nothing, and how many requests it answers.

The server has one core, and its client another (Linux). Latency is that of one request at a time on one connection,
beside `session.run` in the client, in rounds that alternate; gRPC's has that of grpcio's own client in it. Throughput
is that of a closed loop over several connections; it hides what requests that are late would wait, so only its rate is
given, with the CPU time of both sides: a client that is busy is what was measured.

python benchmarks/bench_serving.py --seconds 5
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import xpuruntime as xrt
from harness import interleaved, table, write
from xpuruntime.serving.messages import InferRequest, Tensor
from xpuruntime.serving.protocol.infer_messages import read_infer_response, write_infer_request
from xpuruntime.serving.protocol.rest_client import read_response, write_request
from xpuruntime.testing import models

SHAPE = (4, 64)
INFER = "/inference.GRPCInferenceService/ModelInfer"
#: Microseconds that HTTP with binary tensors may add at the median, and requests that are answered in a second.
TARGETS = {"http_binary_added_us": 150.0, "http_binary_per_second": 12_000.0, "grpc_per_second": 4_000.0}
POLICY = {"execution": {"device": "cpu", "threads": 1}}
_TICK = os.sysconf("SC_CLK_TCK")


def serve(path: str, core: int) -> None:
    """Serve the model, print both addresses, and end when the input ends."""
    os.sched_setaffinity(0, {core})
    with (
        xrt.InferenceSession(path, policy=POLICY) as session,
        xrt.serving.Server({"mlp": session}, http="127.0.0.1:0", grpc="127.0.0.1:0") as server,
    ):
        print(server.http_address, server.grpc_address, flush=True)
        sys.stdin.read()


class Connection:
    """A connection that is kept, with one request on it at a time."""

    def __init__(self, address: str, request: bytes) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = request
        self._received = b""

    def send(self) -> None:
        self._received = b""
        self.socket.sendall(self.request)

    def receive(self) -> bytes:
        """Return the response once it is whole, and nothing before."""
        self._received += self.socket.recv(1 << 20)
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return b""
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return self._received if len(body) >= length else b""

    def ask(self) -> bytes:
        self.send()
        while not (answer := self.receive()):
            pass
        return answer


def http_request(request: InferRequest, *, binary: bool) -> bytes:
    body, length = write_request(request, binary=binary)
    head = f"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    if length is not None:
        head += f"Inference-Header-Content-Length: {length}\r\n"
    return f"{head}\r\n".encode() + body


def output_of(answer: bytes) -> np.ndarray:
    head, _, body = answer.partition(b"\r\n\r\n")
    stated = head.lower().partition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0]
    return read_response(body, int(stated) if stated else None).outputs[0].data


def http_rate(address: str, request: bytes, connections: int, seconds: float) -> float:
    """Return how many requests a second are answered, one at a time on each connection."""
    made = [Connection(address, request) for _ in range(connections)]
    answered = 0
    with selectors.DefaultSelector() as selector:
        for one in made:
            selector.register(one.socket, selectors.EVENT_READ, one)
            one.send()
        start = time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            for key, _ in selector.select(1.0):
                if answer := key.data.receive():
                    assert answer.startswith(b"HTTP/1.1 200 ")
                    answered += 1
                    key.data.send()
    for one in made:
        one.socket.close()
    return answered / (now - start)


def grpc_rate(channel: Any, message: bytes, calls: int, seconds: float) -> float:
    """Return how many calls a second are answered, with so many in flight."""
    call = channel.unary_unary(INFER)
    waiting = [call.future(message) for _ in range(calls)]
    answered = 0
    start = time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        waiting.pop(0).result()
        answered += 1
        waiting.append(call.future(message))
    for one in waiting:
        one.result()
    return answered / (now - start)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def rates(cases: dict[str, Any], server: int, seconds: float) -> dict[str, dict[str, float]]:
    found = {}
    for name, rate in cases.items():
        rate(0.5)
        theirs, own = cpu_seconds(server), cpu_seconds(os.getpid())
        per_second = rate(seconds)
        busy = (cpu_seconds(server) - theirs) / seconds, (cpu_seconds(os.getpid()) - own) / seconds
        found[name] = {"per_second": per_second, "server_busy": busy[0], "client_busy": busy[1]}
        print(f"  {name:<28}  {per_second:10.0f} a second   server {busy[0]:.0%} busy, client {busy[1]:.0%}")
    return found


def measure(options: argparse.Namespace, path: Path, http: str, address: str, server: int) -> dict[str, Any]:
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    request = InferRequest("mlp", [Tensor("x", "FP32", SHAPE, x)])
    binary, json = (http_request(request, binary=one) for one in (True, False))
    message = write_infer_request(request)
    with xrt.InferenceSession(path, policy=POLICY) as session, grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER)
        connections = {"HTTP binary": Connection(http, binary), "HTTP JSON": Connection(http, json)}
        expected = session.run({"x": x})["y"]
        for one in connections.values():
            np.testing.assert_array_equal(output_of(one.ask()), expected)
        np.testing.assert_array_equal(read_infer_response(call(message)).outputs[0].data, expected)
        cases: dict[str, Any] = {"session.run": lambda: session.run({"x": x})}
        cases |= {name: one.ask for name, one in connections.items()}
        cases["gRPC"] = lambda: call(message)
        print("one request at a time:")
        samples = interleaved(cases, calls=options.calls, rounds=options.rounds, rotate=True)
        medians = table(samples)
        print(f"{options.connections} at a time:")
        throughput = rates(
            {
                "HTTP binary": lambda seconds: http_rate(http, binary, options.connections, seconds),
                "HTTP JSON": lambda seconds: http_rate(http, json, options.connections, seconds),
                "gRPC": lambda seconds: grpc_rate(channel, message, options.connections, seconds),
            },
            server,
            options.seconds,
        )
    added = {
        name: statistics.median(a - b for a, b in zip(samples[name], samples["session.run"]))
        for name in samples
        if name != "session.run"
    }
    for name, microseconds in added.items():
        print(f"{name} adds {microseconds:.0f} us at the median of rounds")
    return {"shape": SHAPE, "median_us": medians, "added_us": added, "throughput": throughput, "targets": TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="requests in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each throughput")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "CORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this takes two cores: one for the server, one for its client")
    with tempfile.TemporaryDirectory() as folder:
        path = models.save(models.mlp(), Path(folder), "mlp.onnx")
        command = [sys.executable, __file__, "--serve", str(path), str(cores[0])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            http, address = server.stdout.readline().split()
            os.sched_setaffinity(0, {cores[1]})
            try:
                body = measure(options, path, http, address, server.pid)
            finally:
                server.stdin.close()
                server.wait(60)
    write("serving", body, options.out)


if __name__ == "__main__":
    main()
