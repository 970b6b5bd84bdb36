# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processor time of a new process that opens a small model on the CPU and runs it once, beside ONNX Runtime alone.

python benchmarks/bench_cold_start.py
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import xpuruntime as xrt
from harness import write

#: Of ONNX Runtime's own processor time.
TARGET = 1.5
#: Of `xrt --help`, in milliseconds.
HELP_TARGET = 200.0

PLAIN = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {"image": numpy.zeros((1, 1, 8, 8), numpy.float32)})
"""
SESSION = """
import sys, numpy, xpuruntime
with xpuruntime.InferenceSession(sys.argv[1], device="cpu") as session:
    session.run({"image": numpy.zeros((1, 1, 8, 8), numpy.float32)})
"""


def cases(model: str, inputs: str) -> dict[str, list[str]]:
    """Return the command lines; what has no Python of its own starts as the console script does."""
    xrt_command = [sys.executable, "-c", "from xpuruntime_command import main; main()"]
    return {
        "onnxruntime": [sys.executable, "-c", PLAIN, model],
        "session": [sys.executable, "-c", SESSION, model],
        "xrt run": [*xrt_command, "run", model, "--device", "cpu", "--input", f"@{inputs}"],
        "xrt --help": [*xrt_command, "--help"],
    }


def processor_ms(command: list[str]) -> float:
    """Return user and system time of one process and its threads, in milliseconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        np.savez(inputs, image=np.zeros((1, 1, 8, 8), np.float32))
        commands = cases(str(xrt.demo_model_path()), str(inputs))
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):
            for name, command in commands.items():
                taken = processor_ms(command)
                if turn:  # the first fills the caches of files
                    samples[name].append(taken)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        name: statistics.median(ours / plain for ours, plain in zip(samples[name], samples["onnxruntime"]))
        for name in ("session", "xrt run")
    }
    for name, value in medians.items():
        note = f"  {ratios[name]:.2f} times ONNX Runtime (target: {TARGET:g})" if name in ratios else ""
        print(f"{name:12} {value:7.1f} ms{note}")
    body = {"rounds": options.rounds, "samples_ms": samples, "median_ms": medians, "ratios": ratios}
    write("cold_start", {**body, "target_ratio": TARGET, "target_help_ms": HELP_TARGET}, options.out)


if __name__ == "__main__":
    main()
