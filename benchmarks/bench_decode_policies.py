# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captured decode steps under `auto` and under kernels that are named by hand, replayed in turns.

python benchmarks/bench_decode_policies.py

A policy that leaves kernels open may have whole layers fused, one that names kernels may not; with ``fuse=False`` no
step has, so that the single kernels are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
import warnings
from typing import Any

import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch
from bench_generation import PROMPT, SHAPES, model_of, sync
from harness import write
from xpuruntime.measuring.statistics import paired_ratio

OPEN = ("none", "auto")
_AUTO = {"matmul": "auto", "rms_norm": "auto", "attention": "auto"}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "auto": {**_AUTO, "auto_strategy": "best_performance", "tuning": {"budget": "300ms"}},
    "cublasLt": {"matmul": "cublasLt"},
    "skinny": {"matmul": "cuda_raw.skinny"},
    "skinny, norms": {"matmul": "cuda_raw.skinny", "rms_norm": "cuda_raw.rms_norm"},
}
STEPS, ROUNDS = 40, 15
#: The most that a step under `auto` may take of the best under a policy with names.
TARGET = 1.02


def measure(model: Any, device: str, *, fuse: bool) -> dict[str, Any]:
    """Capture a step under each policy, and replay them in turns."""
    captured = xrt_torch.capture_decode(model, max_length=2 * PROMPT, kv_ranges=[2 * PROMPT], compile=False, fuse=fuse)
    ids = torch.randint(1, model.config.vocab_size, (1, PROMPT), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    graphs, firsts, failed = {}, {}, {}
    for name, words in POLICIES.items():
        began = time.perf_counter()
        with xrt_torch.kernel_policy(xrt.KernelPolicy(**words)) if words else contextlib.nullcontext():
            try:
                captured.generate(ids, **options, max_new_tokens=3)
            except Exception as error:
                failed[name] = str(error)[:300]
                continue
        sync(device)
        firsts[name] = round(time.perf_counter() - began, 2)
        if captured._graphs:
            graphs[name] = list(captured._graphs.values())[-1].recording.graph
        print("prepared", "fused" if fuse else "single", name, firsts[name], "s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            captured.generate(ids, **options, max_new_tokens=1)  # the cache has room again
            events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
            events[0].record()
            for event in events[1:]:
                graphs[name].replay()
                event.record()
            events[-1].synchronize()
            taken = [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]
            times[name].append(statistics.median(taken))
    row: dict[str, Any] = {
        "fuse": fuse, "first_call_s": firsts, "failed": failed, "notes": captured.report.notes,
        "reasons": captured.report.reasons, "step_us": {name: statistics.median(own) for name, own in times.items()},
    }  # fmt: skip
    named = [name for name in times if name not in OPEN]
    if named and "auto" in times:
        row["best"] = min(named, key=row["step_us"].get)
        row["auto_of_best"] = list(paired_ratio(times["auto"], times[row["best"]]))
        row["auto_of_none"] = list(paired_ratio(times["auto"], times["none"]))
    captured.reset()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--single", action="store_true", help="only steps of single kernels")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    stated = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for fuse in (False,) if stated.single else (True, False):
        with torch.no_grad():
            row = measure(model_of(stated.shape, stated.device), stated.device, fuse=fuse)
        rows.append(row)
        print({name: value for name, value in row.items() if name != "notes"}, flush=True)
        write("decode_policies", {"shape": stated.shape, "target": TARGET, "rows": rows}, stated.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
