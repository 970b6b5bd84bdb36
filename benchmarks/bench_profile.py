# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cost of a profile: where none was ever taken, after one, and inside one, on a model that computes almost nothing.

    python benchmarks/bench_profile.py --device cpu
    python benchmarks/bench_profile.py --device cuda:0
    python benchmarks/bench_profile.py --device cuda:0 --beside-torch

Four processes take turns: two that have never profiled, whose difference is the noise, one that has once, and one that
does; they are started anew several times. On CUDA the device is waited for after each round of calls, inside its time.
The profile is by CUPTI; with ``--beside-torch``, by PyTorch's profiler, and a fifth process has profiled with
``TEARDOWN_CUPTI=1``, by which PyTorch gives CUPTI back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import xpuruntime as xrt
from harness import table, write
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, ROUNDS, STARTS, WARM = 300, 12, 6, 300
STATES = ("never", "control", "after", "inside")
STATES_BESIDE_TORCH = ("never", "control", "after", "released", "inside")
NAMES = ("session.run", "binding.run", "ops.matmul")
#: A profile that is off may cost this share of a call.
TARGET = 0.01


def calls_on(device: str, path: Path, keep: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return what is timed."""
    x = xrt.Tensor.from_numpy(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))
    policy = {"execution": {"device": device, "threads": 1}} if device == "cpu" else {"execution": {"device": device}}
    session = xrt.InferenceSession(path, engine="onnxruntime", policy=policy)
    feeds = {"x": x.to(device) if device != "cpu" else x.numpy()}
    binding = session.bind(feeds)
    a = feeds["x"]
    b = xrt.Tensor.from_numpy(np.ones((64, 64), np.float32))
    weight = b.to(device) if device != "cpu" else b.numpy()
    out = xrt.ops.matmul(a, weight)
    keep += [session, binding, x, b, weight, out]
    # Looked up in each call, as a profile exchanges them.
    return {
        "session.run": lambda: session.run(feeds),
        "binding.run": lambda: binding.run(),
        "ops.matmul": lambda: xrt.ops.matmul(a, weight, out=out),
    }


def sample(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return microseconds of a call, as the mean of a round, after some that are not counted."""
    for _ in range(CALLS // 6):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS * 1e6


def work(device: str, when: str) -> None:
    """Be one of the processes: a line with the name of a call asks for a sample, and is answered with one of JSON."""
    wait: Callable[[], Any] = (lambda: None) if device == "cpu" else (lambda: xrt.synchronize(device))
    keep: list[Any] = []
    told: dict[str, Any] = {"source": "", "work": 0}
    with tempfile.TemporaryDirectory() as folder:
        calls = calls_on(device, models.save(models.mlp(), Path(folder)), keep)
        for call in calls.values():
            for _ in range(WARM):
                call()
        wait()
        if when in ("after", "released"):
            with xrt.profile():
                for call in calls.values():
                    sample(call, wait)
        for line in sys.stdin:
            call = calls[line.strip()]
            if when == "inside":
                with xrt.profile() as prof:
                    taken = sample(call, wait)
                told = {"source": prof.result.source, "work": len(prof.result.work)}
            else:
                taken = sample(call, wait)
            print(json.dumps({"us": taken, **told}), flush=True)


class Worker:
    """One of the processes."""

    def __init__(self, arguments: list[str], when: str) -> None:
        command = [sys.executable, __file__, *arguments, "--worker", when]
        environment = {**os.environ, "TEARDOWN_CUPTI": "1"} if when == "released" else None
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, name: str) -> dict[str, Any]:
        """Return a sample."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a worker ended: see what it wrote above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beside-torch", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--worker", choices=STATES_BESIDE_TORCH, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        if options.beside_torch:
            import torch

            torch.zeros(1, device=options.device)
        work(options.device, options.worker)
        return
    arguments = ["--device", options.device, *(["--beside-torch"] if options.beside_torch else [])]
    states = STATES_BESIDE_TORCH if options.beside_torch else STATES
    samples: dict[str, list[float]] = {f"{name}, {when}": [] for name in NAMES for when in states}
    source, records = "", 0
    for _ in range(STARTS):
        workers = {when: Worker(arguments, when) for when in states}
        for number in range(ROUNDS):
            first = number % len(states)
            for name in NAMES:
                for when in states[first:] + states[:first]:
                    answer = workers[when].ask(name)
                    samples[f"{name}, {when}"].append(answer["us"])
                    if when == "inside":
                        source, records = answer["source"], max(records, answer["work"])
        for worker in workers.values():
            worker.close()
    medians = table(samples)
    found = {}
    for name in NAMES:
        never, *others = (samples[f"{name}, {when}"] for when in states)
        found[name] = {
            f"{when}_percent": statistics.median((b - a) / a * 100 for a, b in zip(never, other, strict=True))
            for when, other in zip(states[1:], others, strict=True)
        }
        more = found[name]["inside_us"] = statistics.median(b - a for a, b in zip(never, others[-1], strict=True))
        told = ", ".join(
            f"{key.partition('_')[0]} {value:+.2f} %" for key, value in found[name].items() if "percent" in key
        )
        print(f"  {name}: {told}; inside {more:+.2f} us a call")
    print(f"  source {source or 'none'}, up to {records} pieces of device work in {CALLS + CALLS // 6} calls")
    suffix = "cpu" if options.device == "cpu" else "kineto" if options.beside_torch else "cupti"
    body = {
        "device": options.device,
        "source": source,
        "calls_a_round": CALLS,
        "target_off": TARGET,
        "median_us": medians,
        "found": found,
        "samples_us": samples,
    }
    write(f"profile_{suffix}", body, options.out)


if __name__ == "__main__":
    main()
