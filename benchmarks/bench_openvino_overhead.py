# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overhead of a session over OpenVINO's own best calls, on models that compute almost nothing, and on a convnet.

python benchmarks/bench_openvino_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

import xpuruntime as xrt
from harness import interleaved, table, write
from xpuruntime.testing import models

#: In microseconds, over the engine's own best call that gives the same thing.
TARGETS = {"run": 5.0, "bound": 1.0}
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"}


def cases(path: Path, x: np.ndarray, keep: list[Any]) -> dict[str, Any]:
    """One thread each.

    A run has to give arrays that the caller may keep. OpenVINO's own ways to that: copied results of shared inputs; or
    shared results, copied by the caller, for they are overwritten by the next run. The faster of them is its best.
    """
    compiled = ov.Core().compile_model(str(path), "CPU", PROPERTIES)
    kept, viewed, fixed = (compiled.create_infer_request() for _ in range(3))
    feed = {compiled.inputs[0].get_any_name(): x}
    out = np.zeros_like(next(iter(kept.infer(feed).values())))
    fixed.set_input_tensor(0, ov.Tensor(x, shared_memory=True))
    fixed.set_output_tensor(0, ov.Tensor(out, shared_memory=True))
    ours = xrt.InferenceSession(
        path, policy={"execution": {"engine": "openvino", "device": "cpu", "precision": "fp32", "threads": 1}}
    )
    binding = ours.bind(feed)
    run = ours.run
    for answer in (run(feed), run(feed)):
        np.testing.assert_array_equal(next(iter(answer.values())), kept.infer(feed)[0])
    keep += [compiled, kept, viewed, fixed, out, ours, binding, x]
    return {
        "openvino infer, results copied": lambda: kept.infer(feed, share_inputs=True),
        "openvino infer, shared results copied by the caller": lambda: viewed.infer(
            feed, share_inputs=True, share_outputs=True
        )[0].copy(),
        "xpuruntime run": lambda: run(feed),
        "openvino infer, tensors set once": fixed.infer,
        "xpuruntime bound": binding.run,
    }


def overheads(samples: dict[str, list[float]], medians: dict[str, float]) -> dict[str, float]:
    """Return our call to its cost over OpenVINO's best that does the same: the median of the differences of rounds."""
    best = min((name for name in medians if "copied" in name), key=medians.__getitem__)
    pairs = {"xpuruntime run": best, "xpuruntime bound": "openvino infer, tensors set once"}
    return {
        ours: statistics.median(a - b for a, b in zip(samples[ours], samples[theirs], strict=True))
        for ours, theirs in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--out")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    bodies: dict[str, Any] = {}
    keep: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        made = {
            "mlp, any batch, 1 KB": (models.mlp(), (4, 64)),
            "mlp, fixed batch, 1 KB": (models.mlp(batch=4), (4, 64)),
            "mlp, any batch, 256 KB": (models.mlp(), (1024, 64)),
            "convnet, fixed batch": (models.conv(batch=1), (1, 3, 32, 32)),
        }
        for index, (name, (model, shape)) in enumerate(made.items()):
            path = models.save(model, Path(folder), f"{index}.onnx")
            run = cases(path, rng.standard_normal(shape).astype(np.float32), keep)
            samples = interleaved(run, calls=options.calls, rounds=options.rounds, rotate=True)
            print(f"{name}, cpu, one thread, microseconds a call")
            medians = table(samples)
            extra = overheads(samples, medians)
            for ours, value in extra.items():
                target = TARGETS["bound" if "bound" in ours else "run"]
                print(f"  {ours}: {value:+.3f} us over OpenVINO's own best (target: at most +{target:g})")
            bodies[name] = {"shape": shape, "samples_us": samples, "median_us": medians, "overhead_us": extra}
    facts = {"openvino": ov.get_version(), "calls": options.calls, "properties": PROPERTIES, "targets_us": TARGETS}
    write("openvino_overhead", {**facts, "models": bodies}, options.out)


if __name__ == "__main__":
    main()
