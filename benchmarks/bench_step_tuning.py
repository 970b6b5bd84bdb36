# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training steps that `xpuruntime.pytorch.tune` found, beside what a user would write by hand, on one GPU or several.

Models of transformers with bf16 autocast and AdamW, without dropout so that losses can be compared. By hand: the eager
step and `torch.compile` of the function that computes the loss. Each trains from the same weights on the same batches,
as does the tuned step; then all are timed in interleaved rounds. `torch.compile(mode="reduce-overhead")` is a candidate
of the tuner's own race, in the same process: the ratio to it has the worst ends of both intervals.

python benchmarks/bench_step_tuning.py --cases gpt2-8x1024,bert-32x128
python benchmarks/bench_step_tuning.py --ranks 2
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import xpuruntime.pytorch as xrt_torch
from harness import write
from step_tuning_cases import CASES, RANK_CASES, Case
from xpuruntime.measuring.rounds import rotated, timed
from xpuruntime.measuring.statistics import compare
from xpuruntime.pytorch.compiler.compile_hooks import keep_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[..., torch.Tensor]

EAGER, COMPILE, TUNED = "eager", "compile", "tuned"
OVERHEAD = "compile:reduce-overhead"
#: At least so much faster than torch.compile(mode="reduce-overhead"): time of the tuned step to it.
TARGET = 0.95


class Training:
    """A model with its optimizer, from the same weights each time."""

    def __init__(self, case: Case, device: torch.device, layers: int | None) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.model = case.model(layers).to(device)
        if case.wrap == "ddp":
            # On a stream of its own, which its gradients are added up on: a capture cannot have the default stream.
            with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
                self.model = DistributedDataParallel(self.model)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        elif case.wrap == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in case.blocks(self.model):
                fully_shard(block)
            fully_shard(self.model)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self.scaler = torch.amp.GradScaler(device.type) if case.scaler else None
        self.before_step = self._clip if case.clipping else None

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        dtype = torch.float16 if self.case.scaler else torch.bfloat16
        with torch.autocast(self.device.type, dtype):
            return self.model(input_ids=tokens, labels=tokens).loss

    def step_of(self, loss_of: Step) -> Step:
        """Return the step as it is written by hand."""

        def step(tokens: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            parts = tokens.chunk(self.case.accumulation)
            total = torch.zeros((), device=self.device)
            for part in parts:
                loss = loss_of(part) / len(parts)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                total += loss.detach()
            if self.scaler is not None and self.before_step is not None:
                self.scaler.unscale_(self.optimizer)
            if self.before_step is not None:
                self.before_step()
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            return total

        return step

    def tune(self, batch: torch.Tensor, budget: float) -> Any:
        options = {"make_capturable": True, "budget": budget, "launches": LAUNCHES}
        if self.case.accumulation > 1:  # the function does the whole step
            step = self.step_of(self.loss)
            return xrt_torch.tune(step, (batch,), modules=[self.model], **options)
        return xrt_torch.tune(
            self.loss, (batch,), optimizer=self.optimizer, scaler=self.scaler, before_step=self.before_step, **options
        )


LAUNCHES = ("eager", "compile", "compile:reduce-overhead", "capture", "capture:compile")


def peak_of(device: torch.device, made: Callable[[], Any]) -> tuple[Any, int | None]:
    """Return what a function makes, and the peak of the allocator meanwhile, above what was there."""
    if device.type != "cuda":
        return made(), None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    value = made()
    torch.cuda.synchronize(device)
    return value, torch.cuda.max_memory_allocated(device) - before


def measure_case(name: str, case: Case, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train by hand and tuned, then time all of it in the same rounds."""
    generator = torch.Generator().manual_seed(1 + (distributed.get_rank() if options.ranks > 1 else 0))
    batches = [torch.randint(case.words, case.tokens(options.quick), generator=generator).to(device) for _ in range(4)]
    layers = 2 if options.quick else None
    result: dict[str, Any] = {"variants": {}, "failures": {}}
    steps: dict[str, Step] = {}
    for variant in (EAGER, COMPILE):
        training = Training(case, device, layers)
        loss_of = training.loss
        if variant != EAGER:
            loss_of = torch.compile(training.loss)
        step = training.step_of(loss_of)
        begun = time.perf_counter()
        try:
            losses, peak = peak_of(device, lambda step=step: curve(step, batches, options.steps))
        except Exception as error:
            result["failures"][variant] = f"{type(error).__name__}: {error}"[:300]
            continue
        steps[variant] = step
        result["variants"][variant] = {"losses": losses, "peak": peak, "prepare_s": time.perf_counter() - begun}
    training = Training(case, device, layers)
    begun = time.perf_counter()
    tuned = training.tune(batches[0], options.budget)
    seconds = time.perf_counter() - begun
    if options.rank == 0:
        print(f"{name}\n{tuned}", flush=True)
    with tuned:
        losses, peak = peak_of(device, lambda: curve(tuned, batches, options.steps))
    winner = next(row for row in tuned.candidates if row.name == tuned.name)
    result["variants"][TUNED] = {"losses": losses, "peak": winner.memory or peak, "prepare_s": seconds}
    result |= {"winner": tuned.name, "verdict": tuned.verdict, "candidates": [asdict(row) for row in tuned.candidates]}

    steps[TUNED] = tuned
    finish = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None

    def turn(step: Step) -> Callable[[int, int], Any]:
        sampler = timed(lambda: step(batches[1]), finish)

        def run(calls: int, samples: int) -> Any:
            with step if step is tuned else nullcontext():
                sampler(1, 1)  # finds kernels again after the policy has changed
                return sampler(calls, samples)

        return run

    with keep_compiled():
        turns = {variant: turn(step) for variant, step in steps.items()}
        samples = {variant: [] for variant in steps}
        for number in range(-1, options.rounds):
            for variant in rotated(list(turns), max(number, 0)):
                found = turns[variant](options.calls, 1)[0] / options.calls
                if number >= 0:
                    samples[variant].append(found)
    reference = result["variants"][EAGER]["losses"]
    for variant, row in result["variants"].items():
        row["samples_ms"] = [one * 1e3 for one in samples[variant]]
        row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], reference))
    result["ratios"] = {}
    for variant in set(samples) - {TUNED}:
        found = compare(samples[TUNED], samples[variant])
        result["ratios"][variant] = [found.ratio, found.low, found.high]
    tuned.reset()  # else NCCL waits for its graphs when the process group ends
    overhead = next((row for row in tuned.candidates if row.name == OVERHEAD), None)
    if overhead is not None and overhead.ratio and winner.ratio and winner.name != OVERHEAD:
        (ours, low, high), (other, least, most) = winner.ratio, overhead.ratio
        result["ratios"][OVERHEAD] = [ours / other, low / most, high / least]
    return result


def curve(step: Step, batches: list[torch.Tensor], steps: int) -> list[float]:
    """Return the losses of some steps."""
    return [float(step(batches[turn % len(batches)])) for turn in range(steps)]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases in this process."""
    warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
    device = torch.device(options.device, options.rank) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    known = RANK_CASES if options.ranks > 1 else CASES
    found: dict[str, Any] = {}
    for name in options.cases.split(",") if options.cases else known:
        begun = time.perf_counter()
        found[name] = measure_case(name, known[name], options, device)
        found[name]["seconds"] = time.perf_counter() - begun
        torch.compiler.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.rank == 0:
            Path(options.partial).write_text(json.dumps(found))
    return found


def ranks(options: argparse.Namespace, arguments: list[str]) -> None:
    """Start this program once a rank, and end all where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(options.ranks):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                       "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": str(rank)}  # fmt: skip
        command = [sys.executable, __file__, *arguments, "--rank", str(rank), "--partial", options.partial]
        started.append(subprocess.Popen(command, env={**os.environ, **environment}))
    while any(one.poll() is None for one in started):
        if any(one.poll() not in (None, 0) for one in started):
            for one in started:
                one.kill()
        time.sleep(0.2)
    if any(one.returncode for one in started):
        sys.exit(f"the ranks ended with {[one.returncode for one in started]}")


def show(found: dict[str, Any]) -> None:
    """Print a line a variant."""
    print(f"{'case':16} {'variant':26} {'ms':>8} {'MiB':>7} {'loss off':>9}  tuned to it")
    for name, case in found.items():
        for variant, row in case["variants"].items():
            times = sorted(row["samples_ms"])
            ratio = case["ratios"].get(variant)
            told = "" if ratio is None else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"
            label = f"{TUNED} ({case['winner']})" if variant == TUNED else variant
            size = "" if row["peak"] is None else f"{row['peak'] / 2**20:.0f}"
            print(f"{name:16} {label:26} {times[len(times) // 2]:8.3f} {size:>7} {row['loss_difference']:9.1e}  {told}")
        for row in case["candidates"]:
            if row["seconds"] is not None:
                ratio = case["ratios"].get(row["name"]) if row["name"] == OVERHEAD else None
                told = "" if ratio is None else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"
                size = "" if row["memory"] is None else f"{row['memory'] / 2**20:.0f}"
                off = row["loss_difference"] or 0.0
                label, time_ms = row["name"], row["seconds"] * 1e3
                print(f"{name:16}   {label:24} {time_ms:8.3f} {size:>7} {off:9.1e}  {told}")
        for variant, reason in case["failures"].items():
            print(f"{name:16} {variant:26} FAILED: {reason}")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}, with ranks of {', '.join(RANK_CASES)}; default: all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=5, help="steps of a variant in a round")
    parser.add_argument("--steps", type=int, default=40, help="of the loss curves")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of the tuner's race")
    parser.add_argument("--quick", action="store_true", help="two layers and short rows: does it run?")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--partial", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
        run(options)
        distributed.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        options.partial = str(Path(folder, "cases.json"))
        arguments = copy.copy(sys.argv[1:])
        options.rank = 0
        try:
            ranks(options, arguments) if options.ranks > 1 else run(options)
        finally:
            if Path(options.partial).exists():
                found = json.loads(Path(options.partial).read_text())
                body = {
                    "ranks": options.ranks, "rounds": options.rounds, "calls": options.calls, "quick": options.quick,
                    "target": TARGET, "cases": found,
                }  # fmt: skip
                write("step_tuning" if options.ranks == 1 else f"step_tuning_{options.ranks}", body, options.out)
                show(found)


if __name__ == "__main__":
    main()
