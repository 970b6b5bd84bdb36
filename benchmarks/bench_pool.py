# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cost of allocating and freeing memory from Python, beside the pools people use today.

python benchmarks/bench_pool.py --device cpu
python benchmarks/bench_pool.py --device cuda:0
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING, Any

import xpuruntime as xrt
from harness import interleaved, table, write

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1 << 10, 1 << 20, 64 << 20)
#: Microseconds for allocating and freeing 1 MiB that is cached; CuPy's pool took 0.98 when this was set.
TARGET = 0.8


def our_cases(device: str, size: int) -> dict[str, Callable[[], Any]]:
    kinds = ("caching", "direct") if device == "cpu" else ("caching", "direct", "driver", "pinned")
    pools = {kind: xrt.MemoryPool(device, kind, name=f"bench {kind}") for kind in kinds}

    def allocate(pool: xrt.MemoryPool) -> Callable[[], Any]:
        method = pool.allocate
        return lambda: method(size)

    return {f"xpuruntime {kind}": allocate(pool) for kind, pool in pools.items()}


def other_cases(device: str, size: int) -> dict[str, Callable[[], Any]]:
    """Give PyTorch's and CuPy's pools on the same device where they are installed; on the CPU, NumPy's allocation."""
    cases: dict[str, Callable[[], Any]] = {}
    if device == "cpu":
        import numpy as np

        cases["numpy.empty"] = lambda: np.empty(size, np.uint8)
        return cases
    if importlib.util.find_spec("torch"):
        import torch

        cases["torch.empty"] = lambda: torch.empty(size, dtype=torch.uint8, device=device)
    if importlib.util.find_spec("cupy"):
        import cupy

        with cupy.cuda.Device(int(device.partition(":")[2] or 0)):
            pool = cupy.cuda.MemoryPool()
            driver = cupy.cuda.MemoryAsyncPool()
        cases["cupy MemoryPool"] = lambda: pool.malloc(size)
        cases["cupy MemoryAsyncPool"] = lambda: driver.malloc(size)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--out")
    options = parser.parse_args()
    results = {}
    for size in SIZES:
        cases = {**our_cases(options.device, size), **other_cases(options.device, size)}
        # Pools that ask the device every time are measured apart: their cost would disturb the others.
        slow = {name: case for name, case in cases.items() if name.split()[-1] in ("direct", "pinned")}
        quick = {name: case for name, case in cases.items() if name not in slow}
        samples = interleaved(quick, calls=options.calls, rounds=options.rounds)
        samples |= interleaved(slow, calls=max(options.calls // 20, 1), rounds=options.rounds)
        print(f"allocate and free {size >> 10} KiB, {options.device}, microseconds a call")
        results[str(size)] = {"samples_us": samples, "median_us": table(samples)}
    ours = results[str(1 << 20)]["median_us"]["xpuruntime caching"]
    print(f"  xpuruntime caching, 1 MiB: {ours:.3f} us (target: at most {TARGET:g})")
    kind = options.device.partition(":")[0]
    body = {"device": options.device, "calls": options.calls, "sizes": results, "target_us": TARGET}
    write(f"pool_{kind}", body, options.out)


if __name__ == "__main__":
    main()
