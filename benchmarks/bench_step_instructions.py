# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How many instructions does a policy add to an eager training step on the host? Counted by valgrind's callgrind.

python benchmarks/bench_step_instructions.py

Times of a step on a host that others use differ by more than a policy costs; instructions do not. The model has BERT's
layers, and widths so small that nearly all instructions are those of the host's way to kernels. A process for each
state runs some steps, and another one more of them: the difference is that of steps alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import write

#: Steps of the two processes of a state, after those in which the calls of a step become known.
FEW, MORE, SETTLE = 10, 70, 6
#: More instructions than native that a step may take, as a part of them.
TARGET = 0.01
STATES = ("native", "products", "products, norms, attention", "all three, of a phase", "tuned", "cleared")


def run(state: str, steps: int) -> None:
    """Train in one of `STATES`."""
    import torch

    import xpuruntime.pytorch as xt
    from bench_override_overhead import STEP_STATES, with_more
    from bench_training_step import TUNED
    from training_models import Encoder, Size, loss_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = Size(layers=12, width=16, heads=2, words=64, positions=64)
    model = Encoder(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, wanted = (torch.randint(size.words, (1, 8)) for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(tokens), wanted)
        loss.backward()
        optimizer.step()

    everything = STEP_STATES["products, norms, attention"]
    if state == "tuned":
        xt.set_kernel_policy(TUNED)
    elif state in ("all three, of a phase", "cleared"):
        xt.set_kernel_policy(rules=with_more(everything, phase="infer"))
    elif state != "native":
        xt.set_kernel_policy(rules=STEP_STATES[state])
    for _ in range(SETTLE):
        step()
    if state == "cleared":
        xt.clear_kernel_policy()
        step()
    gc.collect()
    gc.disable()  # when it runs is no matter of steps
    for _ in range(steps):
        step()


def trained(state: str, steps: int, folder: Path, *tool: str) -> str:
    """Train in a process of its own, and return what it says on standard error."""
    environment = {
        **os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "avx2",  # what valgrind knows
        "XPURUNTIME_TUNING_CACHE": str(folder / "tuning.json"),
    }  # fmt: skip
    command = [*tool, sys.executable, __file__, "--state", state, "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{state}, {steps} steps, exit status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stderr


def counted(state: str, steps: int, folder: Path) -> int:
    """Return the instructions of a process that trains so."""
    tool = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder / 'callgrind.out'}")
    said = trained(state, steps, folder, *tool)
    found = re.search(r"Collected : (\d+)", said)
    if found is None:
        raise RuntimeError(f"callgrind has counted nothing:\n{said[-2000:]}")
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--state", choices=STATES, help="train in one state, and count nothing")
    parser.add_argument("--steps", type=int, default=FEW, help="with --state")
    options = parser.parse_args()
    if options.state:
        run(options.state, options.steps)
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not on PATH. On Debian and Ubuntu: apt-get install valgrind", file=sys.stderr)
        return 1
    result: dict[str, Any] = {"steps": [FEW, MORE], "target": TARGET, "instructions": {}}
    with tempfile.TemporaryDirectory() as folder:
        for state in STATES:
            if state == "tuned":
                trained(state, 0, Path(folder))  # kernels are measured here, where nobody counts
            few, more = (counted(state, steps, Path(folder)) for steps in (FEW, MORE))
            result["instructions"][state] = (more - few) / (MORE - FEW)
            native = result["instructions"]["native"]
            part = result["instructions"][state] / native - 1
            print(f"{result['instructions'][state]:14,.0f} a step  {part:+7.2%}  {state}", flush=True)
    write("step_instructions", result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
