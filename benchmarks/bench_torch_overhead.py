# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overhead of a session over PyTorch's own call of the same exported program, on a model that computes almost nothing.

python benchmarks/bench_torch_overhead.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xpuruntime as xrt
from harness import interleaved, table, write

SHAPE = (4, 64)
#: In microseconds, over the engine's own best call.
TARGETS = {"run": 5.0, "bound": 1.0}


def program(folder: Path) -> Path:
    """Write an MLP as an exported program."""
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
    path = folder / "mlp.pt2"
    torch.export.save(torch.export.export(mlp, (torch.zeros(SHAPE),)), path)
    return path


def cases(path: Path, keep: list[Any]) -> dict[str, Any]:
    """Return the calls by name."""
    module = torch.export.load(path).module(check_guards=False)  # the quickest that PyTorch offers
    session = xrt.InferenceSession(path, device="cpu")
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    array, result = x.numpy().copy(), torch.empty(SHAPE)
    name = session.inputs[0].name
    binding = session.bind({name: x}, {"output": result})
    feeds, arrays = {name: x}, {name: array}
    for _ in range(2):
        np.testing.assert_allclose(session.run(feeds)["output"].numpy(), module(x).detach().numpy(), rtol=1e-5)
    keep += [module, session, binding]

    def own() -> Any:
        with torch.no_grad():
            return module(x)

    def own_into() -> None:
        with torch.no_grad():
            result.copy_(module(x))

    def own_numpy() -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(array)).numpy()

    return {
        "torch call": own,
        "xpuruntime run": lambda: session.run(feeds),
        "torch call, NumPy in and out": own_numpy,
        "xpuruntime run, NumPy in and out": lambda: session.run(arrays),
        "torch call and copy into a buffer": own_into,
        "xpuruntime bound": binding.run,
    }


PAIRS = {
    "xpuruntime run": ("torch call", "run"),
    "xpuruntime run, NumPy in and out": ("torch call, NumPy in and out", "run"),
    "xpuruntime bound": ("torch call and copy into a buffer", "bound"),
}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        samples = interleaved(cases(program(Path(folder)), keep), calls=options.calls, rounds=options.rounds, warm=50)
    print(f"toy MLP {SHAPE}, PyTorch on cpu, microseconds a call")
    medians = table(samples)
    overhead = {name: medians[name] - medians[own] for name, (own, _) in PAIRS.items()}
    for name, extra in overhead.items():
        print(f"  {name}: {extra:+.3f} us over torch's own call (target: at most +{TARGETS[PAIRS[name][1]]:g})")
    body = {
        "calls": options.calls,
        "samples_us": samples,
        "median_us": medians,
        "versions": {"torch": torch.__version__},
    }
    write("torch_overhead", {**body, "overhead_us": overhead, "targets_us": TARGETS}, options.out)


if __name__ == "__main__":
    main()
