# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Host cost of an operation: the look-up of a choice, and a whole call from Python beside PyTorch's.

python benchmarks/bench_dispatch.py --device cpu
python benchmarks/bench_dispatch.py --device cuda:0
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import xpuruntime as xrt
from harness import interleaved, table, write

#: Nanoseconds for a choice that was made before.
TARGET = 200.0


def lookup() -> dict[str, float]:
    """Return nanoseconds of a cached choice, measured in C++, for operations with few and with many operands."""
    from xpuruntime import _core

    return dict(_core.measure_choose())


def calls(device: str) -> dict[str, list[float]]:
    matmul = xrt.ops.matmul
    if device == "cpu":
        a, b = np.ones((4, 4), np.float32), np.ones((4, 4), np.float32)
        out = np.empty((4, 4), np.float32)
        return interleaved(
            {
                "xrt.ops.matmul": lambda: matmul(a, b),
                "xrt.ops.matmul, out=": lambda: matmul(a, b, out=out),
                "numpy.matmul": lambda: np.matmul(a, b),
            },
            calls=2000,
            rounds=21,
        )
    import cupy
    import torch

    x, w = (torch.ones(64, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    cx, cw = (cupy.ones((64, 64), cupy.float16) for _ in range(2))
    mm = torch.mm
    cases: dict[str, Any] = {
        "xrt.ops.matmul": lambda: matmul(x, w),
        "torch.mm": lambda: mm(x, w),
        "xrt.ops.matmul, cublas.cublas": lambda: matmul(x, w, kernel="cublas.cublas"),
        "cupy.matmul (float16)": lambda: cupy.matmul(cx, cw),
    }
    # Few enough that the queue of the device never fills, so that only the host is measured.
    return interleaved(cases, calls=300, rounds=41, finish=torch.cuda.synchronize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    cached = lookup()
    for name, nanoseconds in cached.items():
        print(f"  cached choice, {name}: {nanoseconds:.0f} ns")
    samples = calls(options.device)
    table(samples)
    kind = options.device.partition(":")[0]
    body = {
        "device": options.device,
        "cached_choice_ns": cached,
        "samples_us": samples,
        "targets": {"cached_choice_ns": TARGET},
    }
    write(f"dispatch_{kind}", body, options.out)


if __name__ == "__main__":
    main()
