# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a profile costs: while none was ever taken, after one, and inside one, on a model that computes almost nothing.

    python benchmarks/bench_profile.py --device cpu
    python benchmarks/bench_profile.py --device cuda:0
    python benchmarks/bench_profile.py --device cuda:0 --beside-torch

On CUDA the device is waited for after each round of calls, inside its time. The profile is by CUPTI; with
``--beside-torch``, by PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import statistics
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

CALLS, ROUNDS, WARM = 300, 60, 300
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


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--beside-torch", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.beside_torch:
        import torch

        torch.zeros(1, device=options.device)
    wait: Callable[[], Any] = (lambda: None) if options.device == "cpu" else (lambda: xrt.synchronize(options.device))
    keep: list[Any] = []
    samples: dict[str, list[float]] = {}
    source, records = "", 0
    with tempfile.TemporaryDirectory() as folder:
        calls = calls_on(options.device, models.save(models.mlp(), Path(folder)), keep)
        for name, call in calls.items():
            for _ in range(WARM):
                call()
            wait()
            samples[f"{name}, never"] = [sample(call, wait) for _ in range(ROUNDS)]
        for _ in range(ROUNDS):
            for name, call in calls.items():
                with xrt.profile() as prof:
                    taken = sample(call, wait)
                samples.setdefault(f"{name}, inside", []).append(taken)
                source, records = prof.result.source, max(records, len(prof.result.work))
                samples.setdefault(f"{name}, after", []).append(sample(call, wait))
    medians = table(samples)
    found = {}
    for name in calls:
        never, after, inside = (medians[f"{name}, {when}"] for when in ("never", "after", "inside"))
        found[name] = {"after_ratio": after / never, "inside_us": inside - after}
        print(f"  {name}: after a profile {after / never - 1:+.2%}, inside one {inside - after:+.2f} us a call")
    print(f"  source {source or 'none'}, up to {records} pieces of device work in a profile of {CALLS} calls")
    spread = {name: statistics.pstdev(values) for name, values in samples.items()}
    suffix = "cpu" if options.device == "cpu" else "kineto" if options.beside_torch else "cupti"
    body = {
        "device": options.device,
        "source": source,
        "calls_a_round": CALLS,
        "target_off": TARGET,
        "median_us": medians,
        "spread_us": spread,
        "found": found,
        "samples_us": samples,
    }
    write(f"profile_{suffix}", body, options.out)
    for one in keep:
        close = getattr(one, "close", None)
        if close is not None:
            close()


if __name__ == "__main__":
    main()
