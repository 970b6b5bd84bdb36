# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of whole training steps: their time on the device by kind, of eager and of compiled steps.

python benchmarks/bench_training_kernels.py

The steps are those of `bench_training_step`. PyTorch's profiler says which kernels ran, and for how long.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from bench_training_step import SHAPES, Training, compiled, eager
from harness import write

STEPS = 3
#: Kind of kernel to what its name has in it; the first that fits counts.
KINDS = {
    "products": r"gemm|nvjet|cutlass|xmma|splitK",
    "attention": r"flash|fmha|sdpa|attention",
    "compiled by Inductor": r"^triton_",
    "optimizer": r"multi_tensor|[Aa]dam",
    "loss": r"[Ss]oft[Mm]ax|nll_loss",
    "norms": r"[Ll]ayer_?[Nn]orm|GammaBeta|RowwiseMoments",
    "embedding": r"embedding|indexSelect|index_|sort|scan|Radix|unique",
    "copies and fills of memory": r"^Mem(cpy|set)",
}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "pointwise and sums")


def kernels(step: Any, batch: Any) -> tuple[Counter[str], int]:
    """Return milliseconds by kind, and the number of kernels, of all of `STEPS`."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            step(*batch)
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    count = 0
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            found[kind_of(event.name())] += event.duration_ns() / 1e6
            count += 1
    return found, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--shapes", default="gpt2-8x1024,bert-32x128")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
    cases = []
    for shape in options.shapes.split(","):
        model, size, rows, tokens = SHAPES[shape]
        generator = torch.Generator().manual_seed(1)
        batch: Any = tuple(torch.randint(size.words, (rows, tokens), generator=generator).cuda() for _ in range(2))
        for variant, make in (("eager", eager), ("compile", compiled)):
            step = make(Training(model, size), batch)
            for _ in range(3):
                step(*batch)
            torch.cuda.synchronize()
            found, count = kernels(step, batch)
            times = {kind: time / STEPS for kind, time in found.most_common()}
            cases.append({"shape": shape, "variant": variant, "ms": times, "kernels": count / STEPS})
            print(f"{shape} {variant}: {sum(times.values()):.2f} ms in {count / STEPS:.0f} kernels")
            for kind, time in times.items():
                print(f"  {time:8.3f}  {kind}")
        torch.compiler.reset()
    write("training_kernels", {"steps": STEPS, "cases": cases}, options.out)


if __name__ == "__main__":
    main()
