# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processor time of a new process that opens a small model on the CPU and runs it once, beside ONNX Runtime alone.

Processes of the cases alternate; a ratio of medians has an interval from resampled rounds. The first opening of a model
has an empty cache folder of its own each time; a later one takes the facts of the checked model from the cache. ONNX
Runtime alone is measured with both, since it keeps a database in the same folder, which it makes at first.
An editable install looks each module up in a table of its own; users have a wheel: measure in an environment of one.

python benchmarks/bench_cold_start.py
"""

from __future__ import annotations

import argparse
import os
import statistics
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

#: Of cases whose cache folder is empty.
FIRST = ", first opening"
#: Variables that would leave out what is measured.
NOT_HERE = ("PYTHONDONTWRITEBYTECODE", "XPURUNTIME_DIGEST_CACHE")

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
    session = [sys.executable, "-c", SESSION, model]
    run = [*xrt_command, "run", model, "--device", "cpu", "--input", f"@{inputs}"]
    plain = [sys.executable, "-c", PLAIN, model]
    return {
        f"onnxruntime{FIRST}": plain,
        "onnxruntime": plain,
        f"session{FIRST}": session,
        "session": session,
        f"xrt run{FIRST}": run,
        "xrt run": run,
        "xrt --help": [*xrt_command, "--help"],
    }


def processor_ms(command: list[str], cache: Path) -> float:
    """Return user and system time of one process and its threads, in milliseconds."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_HERE}
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    process = os.posix_spawn(command[0], command, {**environment, "XDG_CACHE_HOME": str(cache)}, file_actions=[nowhere])
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    return 1e3 * (used.ru_utime + used.ru_stime)


def ratio_of(ours: list[float], plain: list[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians, and its 95 % interval from resampled rounds."""
    rng = np.random.default_rng(0)
    rounds = rng.integers(len(ours), size=(10_000, len(ours)))
    resampled = np.median(np.asarray(ours)[rounds], axis=1) / np.median(np.asarray(plain)[rounds], axis=1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return statistics.median(ours) / statistics.median(plain), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        np.savez(inputs, image=np.zeros((1, 1, 8, 8), np.float32))
        commands = cases(str(xrt.demo_model_path()), str(inputs))
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):
            for name, command in commands.items():
                cache = Path(folder, f"{name}{turn}" if name.endswith(FIRST) else "cache")
                taken = processor_ms(command, cache)
                if turn:  # the first fills the caches of files
                    samples[name].append(taken)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    found = {
        name: ratio_of(samples[name], samples[f"onnxruntime{FIRST if name.endswith(FIRST) else ''}"])
        for name in samples
        if name.startswith(("session", "xrt run"))
    }
    for name, value in medians.items():
        print(f"{name:27} {value:7.1f} ms", end="")
        if name in found:
            print("  {:.2f} times ONNX Runtime [{:.2f}, {:.2f}]".format(*found[name]), f"(target: {TARGET:g})", end="")
        print()
    ratios = {name: ratio for name, (ratio, _, _) in found.items()}
    intervals = {name: ends for name, (_, *ends) in found.items()}
    body = {"rounds": options.rounds, "samples_ms": samples, "median_ms": medians, "ratios": ratios}
    body["intervals"] = intervals
    write("cold_start", {**body, "target_ratio": TARGET, "target_help_ms": HELP_TARGET}, options.out)


if __name__ == "__main__":
    main()
