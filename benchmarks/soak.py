# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Does memory grow? A million runs of the toy model, and a thousand sessions opened and closed.

    python benchmarks/soak.py [--device cpu] [--runs 1000000] [--sessions 1000]

Exits with 1 when resident memory (and, on CUDA, device memory) at the end is more than the allowance above what it was
after a tenth of the work. ONNX Runtime's own CUDA sessions leave memory behind when they are closed, so there a third
of the sessions is opened with ONNX Runtime alone first, and what each of those leaves is taken off ours.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import xpuruntime as xrt
from harness import write
from xpuruntime.testing import models

ALLOWANCE = 8 << 20


def resident() -> int:
    """Return resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def held(device: str) -> dict[str, int]:
    """Return what is held now, in bytes."""
    gc.collect()
    found = {"resident": resident()}
    if device.startswith("cuda"):
        info = xrt.Device(device)
        info.synchronize()
        found["device"] = info.total_memory - info.free_memory
    return found


def grow(work: Any, times: int, device: str) -> dict[str, Any]:
    """Do `work` `times` times; compare the memory after a tenth with the memory at the end."""
    start = time.perf_counter()
    for _ in range(times // 10):
        work()
    early = held(device)
    for _ in range(times - times // 10):
        work()
    late = held(device)
    growth = {name: late[name] - early[name] for name in late}
    return {"times": times, "seconds": time.perf_counter() - start, "early": early, "late": late, "growth": growth}


def plain_session(path: Path, device: str, feed: dict[str, Any]) -> None:
    """Open, run and drop a session of ONNX Runtime alone, on a stream given to it, as ours are."""
    import onnxruntime as ort

    stream = xrt.Stream(device)
    options = {
        "device_id": device.partition(":")[2] or "0",
        "has_user_compute_stream": "1",
        "user_compute_stream": str(stream.handle),
    }
    session = ort.InferenceSession(str(path), providers=[("CUDAExecutionProvider", options)])
    session.run(None, feed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--out")
    options = parser.parse_args()
    feed = {"x": np.ones((4, 64), np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        path = models.save(models.mlp(), Path(folder))
        policy = {"execution": {"device": options.device, "threads": 1}}
        with xrt.InferenceSession(path, policy=policy) as session:
            binding = session.bind({"x": (4, 64)})

            def run() -> None:
                session.run(feed)
                binding.run()

            runs = grow(run, options.runs, options.device)

        def cycle() -> None:
            with xrt.InferenceSession(path, policy=policy) as other:
                other.run(feed)

        parts = {"runs": runs}
        if options.device.startswith("cuda"):
            parts["plain"] = grow(
                lambda: plain_session(path, options.device, feed), options.sessions // 3, options.device
            )
        parts["sessions"] = grow(cycle, options.sessions, options.device)
    ours = parts["sessions"]["growth"]
    if "plain" in parts:
        share = parts["sessions"]["times"] / parts["plain"]["times"]
        ours = {what: value - round(share * parts["plain"]["growth"][what]) for what, value in ours.items()}
    parts["sessions"]["own_growth"] = ours
    worst = max(*runs["growth"].values(), *ours.values())
    for name, part in parts.items():
        grown = ", ".join(f"{what} {value / 1024:+.0f} KiB" for what, value in part["growth"].items())
        print(f"{part['times']} {name} in {part['seconds']:.1f} s: {grown} after the first tenth")
    print(f"worst growth of ours: {worst / 1024:+.0f} KiB (allowed: {ALLOWANCE / 1024:.0f} KiB)")
    body = {"device": options.device, **parts, "worst": worst, "allowance": ALLOWANCE}
    write(f"soak_{options.device.partition(':')[0]}", body, options.out)
    return int(worst > ALLOWANCE)


if __name__ == "__main__":
    sys.exit(main())
