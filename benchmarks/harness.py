# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What every benchmark here shares: interleaved rounds, the environment, JSON out."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("xpuruntime", "onnxruntime", "onnxruntime-gpu", "numpy", "torch", "torchvision", "cupy-cuda13x", "onnx")


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
    """Time several calls side by side.

    Parameters
    ----------
    cases : dict of str to callable
    calls : int
        Calls per round of one case; a round gives one sample, their mean.
    rounds : int
        Each round runs every case once, so that drift of the machine meets all of them.
    warm : int
        Calls of each case before the first round.
    finish : callable, optional
        Called after the calls of a round, inside its time: such as a device synchronisation.
    rotate : bool
        Begin each round with another case, so that none always runs after the same one.

    Returns
    -------
    dict of str to list of float
        Microseconds a call, one sample a round.
    """
    for run in cases.values():
        for _ in range(warm):
            run()
        if finish is not None:
            finish()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases.items())
    for number in range(rounds):
        first = number % len(order) if rotate else 0
        for name, run in (*order[first:], *order[:first]):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if finish is not None:
                finish()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return samples


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
