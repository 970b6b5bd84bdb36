# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overhead of a server over `session.run`, on a model that computes almost nothing, and its requests per second.

    python benchmarks/bench_serving.py --seconds 5
    python benchmarks/bench_serving.py --requests 1000000

The server has one core, and its client another (Linux). Latency is that of one request at a time on one connection,
beside `session.run` in the client, in rounds that alternate; gRPC's has that of grpcio's own client in it. Throughput
is that of a closed loop over several connections; it hides what requests that are late would wait, so only its rate is
given, with the CPU time of both sides: a client that is busy is what was measured. A handler of grpc.aio that returns
what it gets, and does nothing else, says what of gRPC's time is not ours.

With `--requests` so many go through the server instead, over HTTP and then gRPC, and its memory is compared with what
it was after a tenth of them; exits with 1 where it grew by more than the allowance.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

import xpuruntime as xrt
from harness import interleaved, table, write
from soak import ALLOWANCE
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.protocol.infer_messages import read_infer_response, write_infer_request
from xpuruntime.serving.protocol.rest import read_response, write_request
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (4, 64)
INFER = "/inference.GRPCInferenceService/ModelInfer"
#: Microseconds that a transport may add at the median, and requests that it answers in a second.
TARGETS = {
    "http_binary_added_us": 150.0,
    "grpc_added_us": 250.0,
    "http_binary_per_second": 12_000.0,
    "grpc_per_second": 4_000.0,
}
ECHO = "gRPC, bare echo"
POLICY = {"execution": {"device": "cpu", "threads": 1}}


def serve(path: str, core: int) -> None:
    """Serve the model, print both addresses, and end when the input ends."""
    os.sched_setaffinity(0, {core})
    with (
        xrt.InferenceSession(path, policy=POLICY) as session,
        xrt.serving.Server({"mlp": session}, http="127.0.0.1:0", grpc="127.0.0.1:0") as server,
    ):
        print(server.http_address, server.grpc_address, flush=True)
        sys.stdin.read()


def echo(core: int) -> None:
    """Serve a method of grpc.aio that returns what it gets, in the event loop that the server has."""
    import asyncio

    from xpuruntime.serving.server import _new_loop

    os.sched_setaffinity(0, {core})

    async def answer(message: bytes, context: Any) -> bytes:
        del context
        return message

    class Handlers(grpc.GenericRpcHandler):
        """Has one method under all names."""

        def service(self, handler_call_details: Any) -> Any:
            del handler_call_details
            return grpc.unary_unary_rpc_method_handler(answer)

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print("-", f"127.0.0.1:{port}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await server.stop(0)

    loop = _new_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(run())


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[tuple[int, str, str]]:
    """Start this script as a server, and yield its process and both addresses."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        http, address = server.stdout.readline().split()
        try:
            yield server.pid, http, address
        finally:
            server.stdin.close()
            server.wait(60)


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
    """Return the processor time of all threads that a process has."""
    times = []
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            times.append(int(path.read_text().split()[0]) * 1e-9)
    return sum(times)


def resident(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rates(cases: dict[str, Any], seconds: float) -> dict[str, dict[str, float]]:
    """Return the rate of each case, and processor time of both sides; a case is its server and its loop."""
    found = {}
    for name, (server, rate) in cases.items():
        rate(0.5)
        theirs, own = cpu_seconds(server), cpu_seconds(os.getpid())
        per_second = rate(seconds)
        theirs, own = cpu_seconds(server) - theirs, cpu_seconds(os.getpid()) - own
        found[name] = {
            "per_second": per_second,
            "server_busy": theirs / seconds,
            "client_busy": own / seconds,
            "server_cpu_us": theirs / seconds / per_second * 1e6,
        }
        print(
            f"  {name:<16}  {per_second:8.0f} a second   server {theirs / seconds:.0%} busy, "
            f"{found[name]['server_cpu_us']:.0f} us of a processor each; client {own / seconds:.0%} busy"
        )
    return found


def demanded() -> tuple[np.ndarray, bytes, bytes, bytes]:
    """Return an input, and its requests: HTTP binary, HTTP JSON, gRPC."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    request = InferRequest("mlp", [InferTensor("x", "FP32", SHAPE, x)])
    binary, json = (http_request(request, binary=one) for one in (True, False))
    return x, binary, json, write_infer_request(request)


def measure(options: argparse.Namespace, path: Path, core: int) -> dict[str, Any]:
    x, binary, json, message = demanded()
    with (
        started("--serve", str(path), str(core)) as (server, http, address),
        started("--echo", str(core)) as (bare, _, bare_address),
        xrt.InferenceSession(path, policy=POLICY) as session,
        grpc.insecure_channel(address) as channel,
        grpc.insecure_channel(bare_address) as bare_channel,
    ):
        call, bare_call = channel.unary_unary(INFER), bare_channel.unary_unary(INFER)
        connections = {"HTTP binary": Connection(http, binary), "HTTP JSON": Connection(http, json)}
        expected = session.run({"x": x})["y"]
        for connection in connections.values():
            np.testing.assert_array_equal(output_of(connection.ask()), expected)
        np.testing.assert_array_equal(read_infer_response(call(message)).outputs[0].data, expected)
        cases: dict[str, Any] = {"session.run": lambda: session.run({"x": x})}
        cases |= {name: one.ask for name, one in connections.items()}
        cases["gRPC"] = lambda: call(message)
        cases[ECHO] = lambda: bare_call(message)
        print("one request at a time:")
        samples = interleaved(cases, calls=options.calls, rounds=options.rounds, rotate=True)
        medians = table(samples)
        count = options.connections
        print(f"{count} at a time:")
        throughput = rates(
            {
                "HTTP binary": (server, lambda seconds: http_rate(http, binary, count, seconds)),
                "HTTP JSON": (server, lambda seconds: http_rate(http, json, count, seconds)),
                "gRPC": (server, lambda seconds: grpc_rate(channel, message, count, seconds)),
                ECHO: (bare, lambda seconds: grpc_rate(bare_channel, message, count, seconds)),
            },
            options.seconds,
        )
    added = {
        name: statistics.median(a - b for a, b in zip(samples[name], samples["session.run"]))
        for name in samples
        if name != "session.run"
    }
    for name, microseconds in added.items():
        print(f"{name} adds {microseconds:.0f} us at the median of rounds")
    return {
        "shape": SHAPE,
        "calls": options.calls,
        "connections": count,
        "samples_us": samples,
        "median_us": medians,
        "added_us": added,
        "throughput": throughput,
        "targets": TARGETS,
    }


def soak(options: argparse.Namespace, path: Path, core: int) -> dict[str, Any]:
    """Send so many requests over each transport, and return by how much the memory of the server grows."""
    found: dict[str, Any] = {}
    x, binary, _, message = demanded()
    with (
        started("--serve", str(path), str(core)) as (server, http, address),
        xrt.InferenceSession(path, policy=POLICY) as session,
        grpc.insecure_channel(address) as channel,
    ):
        expected = session.run({"x": x})["y"]
        loops = {
            "HTTP binary": lambda seconds: http_rate(http, binary, options.connections, seconds),
            "gRPC": lambda seconds: grpc_rate(channel, message, options.connections, seconds),
        }
        for name, loop in loops.items():
            early, done, begin = 0, 0.0, time.perf_counter()
            while done < options.requests:
                done += 5.0 * loop(5.0)
                late = resident(server)
                if not early and done >= options.requests / 10:
                    early = late
                print(f"  {name:<12}  {done:10.0f} requests   resident {late / 2**20:.2f} MiB", flush=True)
            found[name] = {
                "times": round(done), "seconds": time.perf_counter() - begin, "early": {"resident": early},
                "late": {"resident": late}, "growth": {"resident": late - early},
            }  # fmt: skip
        np.testing.assert_array_equal(output_of(Connection(http, binary).ask()), expected)
        np.testing.assert_array_equal(
            read_infer_response(channel.unary_unary(INFER)(message)).outputs[0].data, expected
        )
    return {"parts": found, "connections": options.connections, "allowance": ALLOWANCE}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="requests in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each throughput")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--requests", type=int, help="send so many over each transport, and watch the memory")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "CORE"), help=argparse.SUPPRESS)
    parser.add_argument("--echo", type=int, metavar="CORE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return 0
    if options.echo is not None:
        echo(options.echo)
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this takes two cores: one for the server, one for its client")
    os.sched_setaffinity(0, {cores[1]})
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = models.save(models.mlp(), Path(folder), "mlp.onnx")
        if options.requests:
            body = soak(options, path, cores[0])
            write("soak_serving", body, options.out)
            return int(max(part["growth"]["resident"] for part in body["parts"].values()) > ALLOWANCE)
        body = measure(options, path, cores[0])
    write("serving_cpu", {**body, "load_average": [load, os.getloadavg()[0]]}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
