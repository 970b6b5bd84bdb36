# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cost of a policy for a PyTorch call that no rule matches, and for one that an xpuruntime kernel serves.

python benchmarks/bench_override_overhead.py --device cpu
python benchmarks/bench_override_overhead.py --device cuda:0
python benchmarks/bench_override_overhead.py --device cuda:0 --only steps --rows 1 --step-rounds 100   # two minutes

Products, norms and attention are tiny, so that only the host is measured. States of a round follow each other at once,
and of each the least of the rounds is compared, since a host that others use only adds. On CUDA, eager training steps
of a model of BERT's size follow, under policies of whose rules none matches. Their rounds are short and have the states
in an order of their own; the least of a state's steps in a round is compared with that of native, round by round.
`cleared` is native once more: what it is said to cost is noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import statistics
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

import xpuruntime.pytorch as xt
from harness import write
from training_models import BERT, Encoder, Size, loss_of
from xpuruntime.measuring.statistics import paired_ratio
from xpuruntime.pytorch.call_scope import module_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

#: Microseconds over native for a call that passes through.
TARGETS = {
    "mm": 1.0, "mm.out": 1.0, "addmm": 2.0, "bmm": 1.0,
    "layer_norm": 2.0, "layer_norm backward": 2.0, "rms_norm": 2.0, "attention": 2.0, "attention recorded": 2.0,
}  # fmt: skip
_ELSEWHERE = {"match": {"op": "matmul", "m": 100_000}, "use": "cpu.reference"}
_OTHERS = [
    {"match": {"op": "layer_norm", "dtype": "fp64"}, "use": "cpu.reference"},
    {"match": {"op": "rms_norm", "dtype": "fp64"}, "use": "cpu.reference"},
    {"match": {"op": "attention", "dtype": "fp64"}, "use": "torch.math"},
]
#: For each operation an xpuruntime kernel: on the CPU, and on CUDA.
_OURS = {
    "matmul": ("cpu.blas", "cublas.cublasLt"),
    "layer_norm": ("cpu.reference", "cuda_raw"),
    "rms_norm": ("cpu.reference", "cuda_raw"),
    "attention": ("cpu.reference", "cuda_raw.flash_attention_v2"),
}
#: More time than native that a step may take, as a part of it.
STEP_TARGET = 0.01
#: Policies of whose rules no call of a step matches.
_STEP_STATES: dict[str, list[dict[str, Any]] | None] = {
    "native": None,
    "products": [_ELSEWHERE],
    "products, norms, attention": [
        _ELSEWHERE,
        *_OTHERS,
    ],
    "all three, of a module": [
        {**rule, "match": {**rule["match"], "module": "nowhere"}} for rule in (_ELSEWHERE, *_OTHERS)
    ],
    "cleared": None,
}


def operations(device: str, size: int) -> dict[str, Callable[[], Any]]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    bias = torch.ones(size, device=device, dtype=dtype)
    batch = torch.ones(2, size, size, device=device, dtype=dtype)
    mm, addmm, bmm = torch.mm, torch.addmm, torch.bmm
    functional = torch.nn.functional
    x, grad = torch.ones(4, size, device=device, dtype=dtype), torch.ones(4, size, device=device, dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, [size], bias, bias, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward.default
    mask = [True, True, True]
    heads = torch.ones(1, 2, 8, 64, device=device, dtype=dtype)
    recorded = heads.clone().requires_grad_()

    def attend_recorded() -> Any:
        with torch.enable_grad():
            return functional.scaled_dot_product_attention(recorded, recorded, recorded)

    return {
        "mm": lambda: mm(a, b),
        "mm.out": lambda: mm(a, b, out=out),
        "addmm": lambda: addmm(bias, a, b),
        "bmm": lambda: bmm(batch, batch),
        "layer_norm": lambda: functional.layer_norm(x, (size,), bias, bias),
        "layer_norm backward": lambda: backward(grad, x, [size], mean, rstd, bias, bias, mask),
        "rms_norm": lambda: functional.rms_norm(x, (size,), bias),
        "attention": lambda: functional.scaled_dot_product_attention(heads, heads, heads),
        "attention recorded": attend_recorded,
    }


def states(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    ours = {op: words[device != "cpu"] for op, words in _OURS.items()}
    plain = [_ELSEWHERE, *_OTHERS]
    return {
        "native": nullcontext,
        "no rule matches": lambda: xt.kernel_policy(rules=plain),
        "no rule of a phase matches": lambda: xt.kernel_policy(rules=_with(plain, phase="infer")),
        "no rule of a module matches": lambda: in_a_module(_with(plain, module="nowhere")),
        "by xpuruntime kernels": lambda: xt.kernel_policy(**ours),
        "cleared": nullcontext,
    }


@contextmanager
def in_a_module(rules: list[dict[str, Any]]) -> Iterator[None]:
    """Have calls run under rules, in the forward of a module."""
    with xt.kernel_policy(rules=rules), module_paths.inside("layers.0.attention"):
        yield


def _with(rules: list[dict[str, Any]], **more: str) -> list[dict[str, Any]]:
    return [{**rule, "match": {**rule["match"], **more}} for rule in rules]


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


def steps(device: str, size: Size, rows: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Return milliseconds of an eager training step of `rows` sequences of 128 tokens, for each of `_STEP_STATES`.

    One figure a round: the least of `calls` steps, of which each is waited for.
    """
    torch.manual_seed(0)
    kind = torch.device(device).type
    model = Encoder(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, wanted = (torch.randint(size.words, (rows, 128), device=device) for _ in range(2))
    finish = torch.cuda.synchronize if kind == "cuda" else (lambda: None)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            loss = loss_of(model(tokens), wanted)
        loss.backward()
        optimizer.step()
        finish()
        return (time.perf_counter() - start) * 1e3

    samples: dict[str, list[float]] = {name: [] for name in _STEP_STATES}
    order, shuffle = list(_STEP_STATES), random.Random(0).shuffle
    for _ in range(5):
        step()
    gc.collect()
    gc.freeze()  # so that a collection is short
    gc.disable()
    try:
        for _ in range(rounds):
            gc.collect()
            shuffle(order)
            for name in order:
                rules = _STEP_STATES[name]
                with nullcontext() if rules is None else xt.kernel_policy(rules=rules):
                    step(), step(), step()  # in which the calls of a step become known, and caches warm
                    samples[name].append(min(step() for _ in range(calls)))
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def calls(device: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return microseconds of a call of each operation in each of `states`, and print what they come to."""
    cpu = device == "cpu"
    finish = (lambda: None) if cpu else torch.cuda.synchronize
    runs = operations(device, 4 if cpu else 64)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    with torch.no_grad():
        for _ in range(rounds):
            for state, enter in states(device).items():
                with enter():
                    for name, run in runs.items():
                        samples[name].setdefault(state, []).append(once(run, 500 if cpu else 100, finish))
    for name, found in samples.items():
        native = min(found["native"])
        print(f"{name}: native {native:.2f} us; over it, with a target of {TARGETS[name]:.0f}:")
        for state, times in found.items():
            if state != "native":
                print(f"  {min(times) - native:+6.2f}  {state}")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--step-rounds", type=int, default=200)
    parser.add_argument("--rows", default="1,32", help="sequences of a training step, with commas; default: 1,32")
    parser.add_argument("--layers", type=int, help="of the model, in place of BERT's: does it run?")
    parser.add_argument("--only", choices=("calls", "steps"), help="measure and print one part, and write nothing")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"device": options.device}

    def keep() -> None:
        if options.only is None and not options.layers:
            kind = options.device.partition(":")[0]
            write(f"override_overhead_{kind}", result, options.out)

    if options.only != "steps":
        result |= {"samples_us": calls(options.device, options.rounds), "targets": TARGETS}
        keep()
    if options.only == "steps" or (options.only is None and options.device != "cpu"):
        result |= {"step_target": STEP_TARGET, "step_samples_ms": {}}
        size = dataclasses.replace(BERT, layers=options.layers or BERT.layers)
        for rows in map(int, options.rows.split(",")):
            times = steps(options.device, size, rows, options.step_rounds, calls=5)
            result["step_samples_ms"][f"bert-{rows}x128"] = times
            _print_step(rows, times)
            keep()


def _print_step(rows: int, samples: dict[str, list[float]]) -> None:
    native = samples["native"]
    print(f"step of {rows}x128: native {statistics.median(native):.2f} ms; over it, target {STEP_TARGET:.0%}:")
    for state, times in samples.items():
        if state != "native":
            ratio, low, high = paired_ratio(times, native, confidence=0.95)
            print(f"  {ratio - 1:+7.2%}  [{low - 1:+.2%}, {high - 1:+.2%}]  {state}")


if __name__ == "__main__":
    main()
