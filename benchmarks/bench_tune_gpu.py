# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The policy that a search of bound runs finds for ResNet-50 on ONNX Runtime's CUDA provider, beside those by hand.

    python benchmarks/bench_tune_gpu.py --budget 200 --batches 1,32

The search is given the engine and the device, random images, and the accuracy that is allowed; the policies by hand are
those of ``bench_resnet.py``. All are then bound to the same images and timed in interleaved rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # its CUDA libraries are those that ONNX Runtime finds

import xpuruntime as xrt
from bench_resnet import POLICIES, export
from harness import interleaved, write
from xpuruntime.measuring.statistics import paired_ratio

CONTROL = {"execution": {"engine": "onnxruntime", "device": "cuda:0"}}
ACCURACY = {"rtol": 0.05, "atol": 0.05, "cosine": 0.999}
BY_HAND = ("default", "tf32 nhwc graph", "fp16 nhwc graph")
TUNED = "tuned"
CONFIDENCE = 0.99
SAMPLES = 4


def searched(path: Path, batch: int, budget: float) -> xrt.TuneResult:
    """Search a policy for bound runs of a batch size."""
    images = np.random.default_rng(batch).standard_normal((SAMPLES * batch, 3, 224, 224)).astype(np.float32)
    spec = {
        "schema": "xpuruntime.tune/1",
        "objective": {"minimise": "latency.p50", "batch": batch, "call": "bind"},
        "constraints": {"accuracy": ACCURACY},
    }
    return xrt.tune(path, CONTROL, spec=spec, inputs={"image": images}, budget=budget)


def timed(path: Path, batch: int, policies: dict[str, Any], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return microseconds of bound runs, one mean for each round."""
    image = torch.randn(batch, 3, 224, 224, device="cuda", generator=torch.Generator("cuda").manual_seed(batch))
    sessions = {name: xrt.InferenceSession(path, policy=policy) for name, policy in policies.items()}
    bindings = {name: session.bind({"image": image}) for name, session in sessions.items()}
    cases = {name: binding.run for name, binding in bindings.items()}
    found = interleaved(cases, calls=calls, rounds=rounds, finish=torch.cuda.synchronize, rotate=True)
    for name in sessions:
        bindings[name].close()
        sessions[name].close()
    return found


def row(path: Path, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Search, then compare with the policies by hand."""
    result = searched(path, batch, options.budget)
    print(f"batch {batch}: {result.headline} ({result.elapsed:.0f} s): {result.changes}", flush=True)
    for one in result.candidates:
        print(f"  {one.code:12} {one.figure!s:.24} {one.changes} {one.reason[:90]}", flush=True)
    by_hand = {
        name: {**POLICIES[name], "execution": {**CONTROL["execution"], **POLICIES[name].get("execution", {})}}
        for name in BY_HAND
    }
    found = result.policy if result.verdict in ("winner", "tied") else CONTROL
    times = timed(path, batch, {**by_hand, TUNED: found}, options.rounds, options.calls)
    ratios = {name: list(paired_ratio(times[TUNED], times[name], confidence=CONFIDENCE)) for name in BY_HAND}
    for name, (ratio, low, high) in ratios.items():
        print(f"  tuned to {name}: {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {
        "verdict": result.verdict, "headline": result.headline, "changes": result.changes, "stages": result.stages,
        "seconds": result.elapsed, "budget": options.budget, "notes": list(result.notes), "samples_us": times,
        "ratios": ratios,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of each search")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = export(Path(folder))
        rows = {batch: row(path, int(batch), options) for batch in options.batches.split(",")}
    body = {"rounds": options.rounds, "confidence": CONFIDENCE, "accuracy": ACCURACY, "batches": rows}
    write("tune_cuda", body, options.out)


if __name__ == "__main__":
    main()
