# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a policy costs a call of PyTorch's: products that no rule speaks of, products that it gives to our kernels.

python benchmarks/bench_override_overhead.py --device cpu
python benchmarks/bench_override_overhead.py --device cuda:0

The products are tiny, so that only the host is measured. States of a round follow each other at once, and of each the
least of the rounds is compared, since a host that others use only adds. On CUDA, eager training steps of a model of
BERT's size follow, under policies of whose rules none matches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

import xpuruntime.pytorch as xt
from harness import write
from training_models import BERT, Encoder, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

#: Microseconds over native for a call that passes through.
TARGETS = {"mm": 1.0, "mm.out": 1.0, "addmm": 2.0, "bmm": 1.0}
_ELSEWHERE = {"match": {"op": "matmul", "m": 100_000}, "use": "cpu.reference"}
_BY_PHASE = {"match": {"op": "matmul", "m": 100_000, "phase": "infer"}, "use": "cpu.reference"}
_BY_MODULE = {"match": {"op": "matmul", "module": "nowhere"}, "use": "cpu.reference"}
#: More time than native that a step may take, as a part of it.
STEP_TARGET = 0.01
#: Policies of whose rules no call of a step matches.
_STEP_STATES: dict[str, list[dict[str, Any]] | None] = {
    "native": None,
    "products": [_ELSEWHERE],
    "products, norms, attention": [
        _ELSEWHERE,
        {"match": {"op": "layer_norm", "dtype": "fp64"}, "use": "cpu.reference"},
        {"match": {"op": "attention", "dtype": "fp64"}, "use": "torch.math"},
    ],
    "cleared": None,
}


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


def steps(rows: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return milliseconds of an eager training step of `rows` sequences of 128 tokens, for each of `_STEP_STATES`."""
    torch.manual_seed(0)
    model = Encoder(BERT).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, wanted = (torch.randint(BERT.words, (rows, 128), device="cuda") for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(tokens), wanted)
        loss.backward()
        optimizer.step()

    samples: dict[str, list[float]] = {name: [] for name in _STEP_STATES}
    for _ in range(rounds):
        for name, rules in _STEP_STATES.items():
            with nullcontext() if rules is None else xt.kernel_policy(rules=rules):
                step()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    step()
                torch.cuda.synchronize()
                samples[name].append((time.perf_counter() - start) / calls * 1e3)
    return samples


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
                        samples[name].setdefault(state, []).append(once(run, 500 if cpu else 100, finish))
    for name, found in samples.items():
        native = min(found["native"])
        print(f"{name}: native {native:.2f} us; over it, with a target of {TARGETS[name]:.0f}:")
        for state, times in found.items():
            if state != "native":
                print(f"  {min(times) - native:+6.2f}  {state}")
    result: dict[str, Any] = {"device": options.device, "samples_us": samples, "targets": TARGETS}
    if not cpu:
        result |= {"step_target": STEP_TARGET, "step_samples_ms": {}}
        for rows in (1, 32):
            times = result["step_samples_ms"][f"bert-{rows}x128"] = steps(rows, options.rounds, calls=5)
            _print_step(rows, times)
    kind = options.device.partition(":")[0]
    write(f"override_overhead_{kind}", result, options.out)


def _print_step(rows: int, samples: dict[str, list[float]]) -> None:
    native = samples["native"]
    print(f"step of {rows}x128: native {statistics.median(native):.2f} ms; over it, target {STEP_TARGET:.0%}:")
    for state, times in samples.items():
        if state != "native":
            over = statistics.median(time / other for time, other in zip(times, native, strict=True)) - 1
            print(f"  {over:+7.2%}  {state}  ({min(times) / min(native) - 1:+.2%} by the least of each)")


if __name__ == "__main__":
    main()
