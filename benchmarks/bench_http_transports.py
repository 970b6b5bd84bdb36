# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Throughput of ResNet-50 over HTTP, with its own server and with the same application in uvicorn and granian.

    python benchmarks/bench_http_transports.py --out results
    python benchmarks/bench_http_transports.py --device cpu --small --seconds 1

One set of models, one process of clients for each run, binary tensors (602 kB a request). The shares are of the raw
session's best rate, measured before and after. Rounds go through all servers in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

with contextlib.suppress(ImportError):  # its CUDA libraries are those that ONNX Runtime finds
    import torch  # noqa: F401

import xpuruntime as xrt
from bench_serving_gpu import Case, Raw, served_http, settings_of
from harness import write
from onnx_models import resnet
from xpuruntime.serving.models.service import Models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TARGET = 0.5


@contextlib.contextmanager
def in_thread(serve: Callable[[int], Any]) -> Iterator[str]:
    """Run an asyncio server on a free port in a thread of its own; give its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        task = asyncio.create_task(serve(port))
        await stop.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
            break
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


@contextlib.contextmanager
def own(models: Models) -> Iterator[str]:
    with xrt.serving.Server(models, http="127.0.0.1:0") as server:
        yield server.http_address


def uvicorn_server(models: Models) -> Any:
    import uvicorn

    def serve(port: int) -> Any:
        config = uvicorn.Config(
            xrt.serving.asgi_app(models), port=port, log_level="error", lifespan="off", loop="uvloop", http="httptools"
        )
        return uvicorn.Server(config)._serve()

    return in_thread(serve)


def granian_server(models: Models, interface: str = "asgi", threads: int = 2) -> Any:
    from granian.constants import Interfaces
    from granian.server.embed import Server

    target = xrt.serving.asgi_app(models)

    def serve(port: int) -> Any:
        server = Server(target, port=port, interface=Interfaces(interface), runtime_threads=threads, log_enabled=False)
        return server.serve()

    return in_thread(serve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="a model of a few layers, for a trial of this script")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--delay", type=int, default=2000)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--out")
    args = parser.parse_args()
    execution = {"engine": "onnxruntime", "device": args.device}
    execution |= {"cuda_graph": "require"} if args.device != "cpu" else {}
    servers = {"xrt serve": own, "uvicorn": uvicorn_server, "granian": granian_server}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        policy = folder / "policy.yaml"
        policy.write_text(json.dumps({"schema": "xpuruntime.policy/1", "execution": execution}))
        case = Case("resnet", resnet((1, 1, 1), 32, 32, 10) if args.small else resnet(), folder, 100, args.concurrency)
        raw = Raw(case, args.device)
        raw.rates([1, 8, 16, 32, 64], [args.concurrency], args.seconds / 8)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        with Models(settings_of([case], args, policy), gc_freeze=True) as models:
            raw.measure_peak(args.seconds)
            for _ in range(args.rounds):
                for name, server in servers.items():
                    with server(models) as address:
                        served_http(address, case, args.concurrency, args.seconds / 4, folder)  # warm
                        rows[name].append(served_http(address, case, args.concurrency, args.seconds, folder))
            raw.measure_peak(args.seconds)
    peak = mean(raw.peaks)
    body = {
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "raw": raw.peaks,
        "served": rows,
        "target": TARGET,
    }
    print(f"{'server':<12} {'rows/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'of raw':>7}")
    print(f"{'raw run':<12} {peak:9.0f}")
    for name, runs in rows.items():
        rate, p50, p99 = (median(run[key] for run in runs) for key in ("rows_per_second", "p50_ms", "p99_ms"))
        print(f"{name:<12} {rate:9.0f} {p50:8.2f} {p99:8.2f} {rate / peak:7.2f}")
    write("http_transports", body, args.out)


if __name__ == "__main__":
    main()
