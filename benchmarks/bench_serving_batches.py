# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Latency of requests that are batched, with Poisson arrivals at seven tenths of what the model can do.

    python benchmarks/bench_serving_batches.py [--seconds 20]

Requests of one row are handed to models of this process by a thread, as a server does it. The peak is what they answer
with all requests there at once; a latency is counted from when a request was to come. Beside it is what as
much of its own peak would take on a server that costs nothing and is never interrupted: only the times of batches of
each size count there. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from harness import write
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

LOAD, TARGET = 0.7, 2.2
WIDTH, LAYERS = 1024, 24
POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu", "threads": 1}}
ROW = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)


def deep_model() -> Any:
    """Return a model whose batches take some milliseconds, so that what a request costs in Python is little beside."""
    rng, nodes, weights = np.random.default_rng(0), [], []
    for at in range(LAYERS):
        values = (rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{at}"))
        nodes.append(helper.make_node("MatMul", ["x" if at == 0 else f"r{at - 1}", f"w{at}"], [f"h{at}"]))
        nodes.append(helper.make_node("Relu", [f"h{at}"], ["y" if at == LAYERS - 1 else f"r{at}"]))
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "deep", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def batch_seconds(path: Path, rows: int) -> float:
    """Return the median time of a run of so many rows."""
    feed = {"x": np.repeat(ROW, rows, 0)}
    with xrt.InferenceSession(path, policy=POLICY) as session:
        for _ in range(10):
            session.run(feed)
        times = []
        for _ in range(101):
            start = time.perf_counter()
            session.run(feed)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def latencies(service: Models, arrivals: Sequence[float]) -> list[float]:
    """Send a request at each time, in seconds from the first, and return how long each took to be answered."""
    request = InferRequest("m", [InferTensor("x", "FP32", ROW.shape, ROW)])
    done: list[float] = [0.0] * len(arrivals)
    failed: list[BaseException] = []
    left = threading.Semaphore(0)

    def answered(future: Future[Any], at: int) -> None:
        done[at] = time.perf_counter()
        if (error := future.exception()) is not None:
            failed.append(error)
        left.release()

    start = time.perf_counter() + 0.01
    for at, due in enumerate(arrivals):
        while (wait := start + due - time.perf_counter()) > 0:
            time.sleep(wait)
        service.infer(request).add_done_callback(lambda future, at=at: answered(future, at))
    for _ in arrivals:
        left.acquire()
    if failed:
        raise failed[0]
    return [end - start - due for end, due in zip(done, arrivals, strict=True)]


def ideal_latencies(arrivals: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return latencies on an ideal server, which runs what has come as soon as it is idle.

    Parameters
    ----------
    arrivals : sequence of float
    seconds : sequence of float
        Time of a batch by its rows; the last one is the largest batch.
    """
    found: list[float] = []
    now, first = 0.0, 0
    while first < len(arrivals):
        now, stop = max(now, arrivals[first]), first
        while stop < len(arrivals) and stop - first < len(seconds) - 1 and arrivals[stop] <= now:
            stop += 1
        now += seconds[stop - first]
        found += [now - one for one in arrivals[first:stop]]
        first = stop
    return found


def measure(path: Path, size: int, delay_us: int, seconds: float) -> dict[str, Any]:
    """Return the peak, and the latencies at a part of it."""
    batching = {"max_batch_size": size, "max_queue_delay_us": delay_us, "max_queue_size": 0}
    policy = path.with_name("policy.json")
    policy.write_text(json.dumps({"schema": "xpuruntime.policy/1", **POLICY}))
    model = {"source": str(path), "policy": str(policy), "batching": batching}
    settings = ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"m": model}})
    some = sorted({1, 2, 4, size // 2, 3 * size // 4, size})
    curve = np.interp(range(size + 1), some, [batch_seconds(path, rows) for rows in some]).tolist()
    whole = curve[-1]
    # From the main thread, which signals reach, requests go by way of another one.
    with Models(settings, gc_freeze=True) as service, ThreadPoolExecutor(1) as client:  # frozen as by `xrt serve`
        count = int(2 * size / whole)  # two seconds of work
        client.submit(latencies, service, [0.0] * (count // 10)).result()
        start = time.perf_counter()
        client.submit(latencies, service, [0.0] * count).result()
        peak = count / (time.perf_counter() - start)
        gaps = np.random.default_rng(size).exponential(1 / (LOAD * peak), int(LOAD * peak * seconds))
        arrivals = np.cumsum(gaps).tolist()
        found = client.submit(latencies, service, arrivals).result()
    at_its_load = (np.array(arrivals) * peak * whole / size).tolist()  # of a peak of one full batch after the other
    ideal = float(np.quantile(ideal_latencies(at_its_load, curve), 0.99))
    p50, p99 = np.quantile(found, [0.5, 0.99]).tolist()
    return {
        "max_batch_size": size, "max_queue_delay_us": delay_us, "batch_ms": 1e3 * whole, "peak_per_second": peak,
        "requests": len(found), "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "p99_to_batch": p99 / whole,
        "ideal_p99_to_batch": ideal / whole,
        "batch_ms_after": 1e3 * batch_seconds(path, size),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests for each row")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    before, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep.onnx"
        onnx.save(deep_model(), path)
        for size in (8, 16, 32):
            for delay_us in (0, 2000):
                rows.append(one := measure(path, size, delay_us, options.seconds))
                print(
                    f"up to {size:2} rows, delay {delay_us:4} us: batch {one['batch_ms']:.2f} ms, peak "
                    f"{one['peak_per_second']:.0f}/s; at {LOAD:.0%} p50 {one['p50_ms']:.2f} ms, "
                    f"p99 {one['p99_ms']:.2f} ms ({one['p99_to_batch']:.2f} batches; ideal server "
                    f"{one['ideal_p99_to_batch']:.2f})",
                    flush=True,
                )
    body = {"load": LOAD, "target": TARGET, "rows": rows, "seconds": options.seconds, "note": "", "policy": POLICY,
            "load_average": [before, os.getloadavg()[0]]}  # fmt: skip
    write("serving_batches", body, options.out)


if __name__ == "__main__":
    main()
