# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Latency of requests that are batched, with Poisson arrivals at seven tenths of what the server can do.

    pip install mlcommons-loadgen==6.0.17
    python benchmarks/bench_serving_batches.py [--seconds 20] [--server-cores 2]

MLPerf LoadGen issues requests of one row over HTTP to a server that has one core or more, from another core. The peak
is that of its Offline scenario, with all requests there at once; latencies are those of its Server scenario, counted
from when a request was due. Beside them is what as much of its own peak would take on a server that costs nothing and
is never interrupted: only the times of batches of each size count there. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from bench_serving_peers import HERE as SERVERS
from bench_serving_peers import PEERS, cpu_seconds, requests_of, served
from harness import write
from loadgen_client import CONNECTIONS, loadgen_module, offline_scenario, server_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

LOAD, TARGET = 0.7, 2.2
WIDTH, LAYERS, ROWS = 1024, 24, 64
POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu", "threads": 1}}
METHOD = (
    f"MLPerf LoadGen issues requests of one row over HTTP, on {CONNECTIONS} connections from another core, to a server "
    "that has %s: in its Server scenario at random moments (Poisson), at so much of what its Offline scenario reached "
    "with all requests there at once."
)


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
    feed = {"x": np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32)}
    with xrt.InferenceSession(path, policy=POLICY) as session:
        for _ in range(10):
            session.run(feed)
        times = []
        for _ in range(101):
            start = time.perf_counter()
            session.run(feed)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def ideal_latencies(arrivals: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return latencies on an ideal server, which runs what has come as soon as it is idle.

    Parameters
    ----------
    arrivals : sequence of float
    seconds : sequence of float
        Time of a batch by its rows; the last one is the largest batch.
    """
    latencies: list[float] = []
    now, first = 0.0, 0
    while first < len(arrivals):
        now, stop = max(now, arrivals[first]), first
        while stop < len(arrivals) and stop - first < len(seconds) - 1 and arrivals[stop] <= now:
            stop += 1
        now += seconds[stop - first]
        latencies += [now - arrival for arrival in arrivals[first:stop]]
        first = stop
    return latencies


def measure(path: Path, size: int, delay_us: int, seconds: float, cores: str) -> dict[str, Any]:
    """Return the peak, and the latencies at a part of it."""
    some = sorted({1, 2, 4, size // 2, 3 * size // 4, size})
    curve = np.interp(range(size + 1), some, [batch_seconds(path, rows) for rows in some]).tolist()
    whole = curve[-1]
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    with xrt.InferenceSession(path, policy=POLICY) as session:
        expected = np.concatenate([session.run({"x": one[None]})["y"] for one in x])
    requests = requests_of(PEERS["xpuruntime"], x, expected)
    command = [sys.executable, str(SERVERS / "ours.py"), str(path), str(requests.port), str(size), str(delay_us / 1e3)]
    with served(command, {"OMP_NUM_THREADS": "1"}, requests, cores, path.with_suffix(".log")) as pid:
        offline_scenario(requests, size / whole, 1.0)  # settle
        peak = offline_scenario(requests, size / whole, 3.0)
        rate, theirs, start = LOAD * peak.per_second, cpu_seconds(pid), time.perf_counter()
        found = server_scenario(requests, rate, seconds, target_ms=1e3 * TARGET * whole)
        busy = (cpu_seconds(pid) - theirs) / (time.perf_counter() - start)
    # of a peak of one full batch after the other
    at_its_load = [(sample.due - found.samples[0].due) * peak.per_second * whole / size for sample in found.samples]
    ideal = float(np.quantile(ideal_latencies(at_its_load, curve), 0.99))
    plain = found.to_plain()
    return {
        "max_batch_size": size, "max_queue_delay_us": delay_us, "batch_ms": 1e3 * whole,
        "batch_ms_after": 1e3 * batch_seconds(path, size), "peak": peak.to_plain(), "peak_per_second": peak.per_second,
        "requests": len(found.samples), **plain,
        "p99_to_batch": plain["p99_ms"] / 1e3 / whole, "ideal_p99_to_batch": ideal / whole, "server_busy": busy,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests for each row")
    parser.add_argument("--server-cores", type=int, default=1, help="cores of the server")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    loadgen_module()
    cores, count = sorted(os.sched_getaffinity(0)), options.server_cores
    if not 0 < count < len(cores):
        sys.exit(f"of {len(cores)} cores, the server has {count}, and its clients have one: state --server-cores")
    os.sched_setaffinity(0, {cores[count]})
    of_server = ",".join(map(str, cores[:count]))
    before, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep.onnx"
        onnx.save(deep_model(), path)
        for size in (8, 16, 32):
            for delay_us in (0, 2000):
                rows.append(one := measure(path, size, delay_us, options.seconds, of_server))
                print(
                    f"up to {size:2} rows, delay {delay_us:4} us: batch {one['batch_ms']:.2f} ms, peak "
                    f"{one['peak_per_second']:.0f}/s; at {LOAD:.0%} p50 {one['p50_ms']:.2f} ms, "
                    f"p99 {one['p99_ms']:.2f} ms ({one['p99_to_batch']:.2f} batches; ideal server "
                    f"{one['ideal_p99_to_batch']:.2f}; recorded {one['recorded_p99_ms']:.2f} ms); issued late p99 "
                    f"{one['issued_late_p99_ms']:.2f} ms; lost {one['lost']}, wrong {one['wrong']}; server "
                    f"{one['server_busy']:.0%}, client {one['client_busy']:.0%}",
                    flush=True,
                )
    method = METHOD % ("one" if count == 1 else f"{count} of its own")
    body = {"load": LOAD, "target": TARGET, "rows": rows, "seconds": options.seconds, "method": method, "note": "",
            "server_cores": count, "policy": POLICY, "load_average": [before, os.getloadavg()[0]]}  # fmt: skip
    write("serving_batches" if count == 1 else "serving_batches_cores", body, options.out)


if __name__ == "__main__":
    main()
