# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cost of a lock, and whether a fresh process under it runs the same kernels and gives the same bits.

python benchmarks/bench_lock.py --device cuda:0
python benchmarks/bench_lock.py --device cpu --models decoder
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import xpuruntime as xrt
from decoder_model import Sizes, decoder_step, step_inputs
from harness import write
from onnx_models import resnet

#: Seconds: the validators of a lock, before a model is loaded.
TARGETS = {"validate_ms": 20.0}
BATCH, PAST = 4, 64
SIZES = Sizes(layers=4)


def model_of(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of a model, and inputs of it that are the same in every process."""
    if name == "resnet50":
        data, rows = resnet()
        ((given, row),) = rows.items()
        path = folder / f"{name}.onnx"
        path.write_bytes(data)
        return path, {given: np.random.default_rng(0).random((1, *row), np.float32)}
    path = folder / f"{name}.onnx"
    path.write_bytes(decoder_step(BATCH, PAST, SIZES, dtype=np.float32))
    return path, step_inputs(BATCH, PAST, SIZES, np.float32)


def policy_of(name: str, device: str) -> dict[str, Any]:
    """Return a policy that measures the kernels of the products and norms, or of the convolutions."""
    chosen = ("conv", "matmul") if name == "resnet50" else ("matmul", "layer_norm")
    return {
        "mode": "prefer",
        "auto_strategy": "best_performance",
        "execution": {"engine": "onnxruntime", "device": device, "precision": "fp32", "determinism": "run_to_run"},
        "kernels": dict.fromkeys(chosen, "auto"),
    }


def observe(session: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel of every call that xpuruntime dispatched, and the digest of the outputs."""
    report = session.explain(feeds, runs=1)
    kernels = sorted(f"{', '.join(decision.nodes)}: {decision.kernel}" for decision in report.decisions)
    digest = hashlib.sha256()
    for array in session.run(feeds).values():
        digest.update(np.ascontiguousarray(array).tobytes())
    return {"kernels": kernels, "outputs": digest.hexdigest()}


def replay(model: str, lock: str, inputs: str) -> None:
    """Open a model under a lock, as the only work of a process, and print what was observed."""
    from xpuruntime.inference import locked

    feeds = dict(np.load(inputs))
    compare, spent = locked.lock_in_force, []

    def timed(asked: Any, stated: Any, info: Any, machine_of: Any, **options: Any) -> Any:
        probes = []

        def probed(engines: Any) -> Any:  # which every opening does, under a lock or not
            start = time.perf_counter()
            machine = machine_of(engines)
            probes.append(time.perf_counter() - start)
            return machine

        start = time.perf_counter()
        try:
            return compare(asked, stated, info, probed, **options)
        finally:
            spent.append((time.perf_counter() - start - sum(probes)) * 1e3)

    locked.lock_in_force = timed
    start = time.perf_counter()
    with xrt.InferenceSession(model, lock=lock) as session:
        opened = time.perf_counter() - start
        print(json.dumps({**observe(session, feeds), "open_s": opened, "validate_ms": spent[0]}))


def measure(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Lock a model, replay it twice in fresh processes, and return the times and what differed."""
    path, feeds = model_of(name, folder)
    np.savez(folder / "inputs.npz", **feeds)
    lock = folder / f"{name}.lock"
    start = time.perf_counter()
    made = xrt.lock(path, policy_of(name, device), lock, inputs=feeds).lock
    lock_s = time.perf_counter() - start
    start = time.perf_counter()
    with xrt.InferenceSession(path, policy=policy_of(name, device)) as session:
        plain_s = time.perf_counter() - start
        session.run(feeds)
    command = [sys.executable, __file__, "--replay", str(path), str(lock), str(folder / "inputs.npz")]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout) for _ in range(3)]
    calls = [f"{call.node}: {call.kernel}" for call in made.identity.calls]
    return {
        "model": name,
        "device": device,
        "units": len(made.identity.entries),
        "calls": len(calls),
        "configurations": sum("@" in call for call in calls),
        "same_kernels": all(run["kernels"] == runs[0]["kernels"] for run in runs),
        "same_bits": all(run["outputs"] == runs[0]["outputs"] for run in runs),
        "lock_s": lock_s,
        "open_s": plain_s,
        "open_locked_s": min(run["open_s"] for run in runs),
        "validate_ms": [round(run["validate_ms"], 1) for run in runs],
    }


def main() -> int:
    """Measure, print one row a model, and fail where a replay differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--models", nargs="+", default=["resnet50", "decoder"])
    parser.add_argument("--out")
    parser.add_argument("--note", help="sentence for the page, such as what else ran on the machine")
    parser.add_argument("--replay", nargs=3)
    given = parser.parse_args()
    if given.replay:
        replay(*given.replay)
        return 0
    rows = []
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, given.device, Path(folder)))
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    write(f"lock_{given.device.partition(':')[0]}", {"rows": rows, "targets": TARGETS, "note": given.note}, given.out)
    return int(not all(row["same_kernels"] and row["same_bits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
