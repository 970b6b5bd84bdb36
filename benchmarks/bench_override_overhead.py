# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a policy costs a call of PyTorch's: products that no rule speaks of, products that it gives to our kernels.

python benchmarks/bench_override_overhead.py --device cpu
python benchmarks/bench_override_overhead.py --device cuda:0

The products are tiny, so that only the host is measured. States of a round follow each other at once, and of each the
least of the rounds is compared, since a host that others use only adds.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

import xpuruntime.pytorch as xt
from harness import write

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

#: Microseconds over native for a call that passes through.
TARGETS = {"mm": 1.0, "mm.out": 1.0, "addmm": 2.0, "bmm": 1.0}
_ELSEWHERE = {"match": {"op": "matmul", "m": 100_000}, "use": "cpu.reference"}
_BY_PHASE = {"match": {"op": "matmul", "m": 100_000, "phase": "infer"}, "use": "cpu.reference"}
_BY_MODULE = {"match": {"op": "matmul", "module": "nowhere"}, "use": "cpu.reference"}


def operations(device: str, size: int) -> dict[str, Callable[[], Any]]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    bias = torch.ones(size, device=device, dtype=dtype)
    batch = torch.ones(2, size, size, device=device, dtype=dtype)
    mm, addmm, bmm = torch.mm, torch.addmm, torch.bmm
    return {
        "mm": lambda: mm(a, b),
        "mm.out": lambda: mm(a, b, out=out),
        "addmm": lambda: addmm(bias, a, b),
        "bmm": lambda: bmm(batch, batch),
    }


def states(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    ours = "cpu.blas" if device == "cpu" else "cublas.cublasLt"
    return {
        "native": nullcontext,
        "no rule matches": lambda: xt.kernel_policy(rules=[_ELSEWHERE]),
        "no rule of a phase matches": lambda: xt.kernel_policy(rules=[_BY_PHASE]),
        "no rule of a module matches": lambda: xt.kernel_policy(rules=[_BY_MODULE]),
        f"by {ours}": lambda: xt.kernel_policy(matmul=ours),
        "cleared": nullcontext,
    }


def once(run: Callable[[], Any], calls: int, finish: Callable[[], Any]) -> float:
    """Return microseconds of the host for one of `calls`."""
    for _ in range(5):
        run()
    finish()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - start
    finish()
    return taken / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    torch.set_num_threads(1)
    finish = (lambda: None) if cpu else torch.cuda.synchronize
    runs = operations(options.device, 4 if cpu else 64)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    with torch.no_grad():
        for _ in range(options.rounds):
            for state, enter in states(options.device).items():
                with enter():
                    for name, run in runs.items():
                        samples[name].setdefault(state, []).append(once(run, 500 if cpu else 200, finish))
    for name, found in samples.items():
        native = min(found["native"])
        print(f"{name}: native {native:.2f} us; over it, with a target of {TARGETS[name]:.0f}:")
        for state, times in found.items():
            if state != "native":
                print(f"  {min(times) - native:+6.2f}  {state}")
    kind = options.device.partition(":")[0]
    write(
        f"override_overhead_{kind}", {"device": options.device, "samples_us": samples, "targets": TARGETS}, options.out
    )


if __name__ == "__main__":
    main()
