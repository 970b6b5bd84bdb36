# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Common code of all benchmarks: interleaved rounds, the environment, JSON out."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.measuring.rounds import rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "xpuruntime", "onnxruntime", "onnxruntime-gpu", "numpy", "torch", "torchvision", "cupy-cuda13x", "onnx",
    "torchao", "transformers", "triton", "liger-kernel", "quack-kernels", "flash-attn-4", "nvidia-cutlass-dsl",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return hardware and versions, as far as they matter for a figure."""
    from xpuruntime.runtime.snapshot import machine_snapshot

    machine = machine_snapshot()
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = [
        {
            "device": f"cuda:{device.index}",
            "name": device.name,
            "memory": device.total_memory,
            "compute_capability": ".".join(map(str, device.compute_capability)),
            "driver": ".".join(map(str, device.driver_version)),
        }
        for device in machine.cuda
    ]
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": machine.cpu.name,
        "cores": os.cpu_count(),
        "cuda": cuda,
        "packages": versions,
    }


def interleaved(
    cases: dict[str, Callable[[], Any]],
    *,
    calls: int,
    rounds: int,
    warm: int = 50,
    finish: Callable[[], Any] | None = None,
    rotate: bool = False,
) -> dict[str, list[float]]:
    """Return microseconds a call of cases timed side by side, the mean of each round; see `rounds_of`."""
    found = rounds_of(cases, calls=calls, rounds=rounds, warm=warm, finish=finish, rotate=rotate)
    return {name: [seconds * 1e6 for seconds in times] for name, times in found.items()}


def rate(runs: Sequence[Callable[[], Any]], rows: int, seconds: float) -> float:
    """Return rows a second of functions, each called over and over by a thread of its own."""
    counts = [0] * len(runs)
    stop = time.perf_counter() + seconds

    def work(index: int) -> None:
        while time.perf_counter() < stop:
            runs[index]()
            counts[index] += 1

    start = time.perf_counter()
    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(runs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return rows * sum(counts) / (time.perf_counter() - start)


def table(samples: dict[str, list[float]], unit: str = "us", scale: float = 1.0) -> dict[str, float]:
    """Print medians and return them."""
    medians = {name: statistics.median(values) * scale for name, values in samples.items()}
    width = max(map(len, medians))
    for name, median in medians.items():
        spread = statistics.quantiles([v * scale for v in samples[name]], n=10, method="inclusive")
        print(f"  {name:<{width}}  {median:10.3f} {unit}   p10 {spread[0]:.3f}  p90 {spread[-1]:.3f}")
    return medians


def write(name: str, body: dict[str, Any], out: str | None = None) -> Path:
    """Write one result file and return its path."""
    folder = Path(out) if out else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"schema": "xpuruntime.benchmark/1", "name": name, "environment": environment(), **body}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path.name}", file=sys.stderr)
    return path
