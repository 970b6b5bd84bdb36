# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A whole training step of models of GPT-2's and BERT's size, bf16 autocast and AdamW: eager, compiled, captured.

python benchmarks/bench_training_step.py --out FOLDER/training_step.json

All variants of one phase run in turns, in the same rounds. A policy holds process-wide, and torch.compile compiles anew
after it changes, so captures under a policy have phases of their own; in each of them the capture that is written by
hand runs too, made without a policy, and times of different phases are compared by it. Eager steps, whose host is often
what takes the time, are one phase: a policy is set for the turn of its variant, and cleared after it. They train one
model, so that nothing but the policy is another. Those without one and under the tuned one are then compared
in many more rounds of shorter turns, since the host is for seconds faster or slower by a third.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import xpuruntime.pytorch as xrt_torch
from harness import write
from training_models import BERT, GPT2, Decoder, Encoder, Size, loss_of
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.policy_scope import install_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    Batch = tuple[torch.Tensor, torch.Tensor]
    Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Name to model, size, batch and tokens.
SHAPES: dict[str, tuple[type, Size, int, int]] = {
    "gpt2-1x1024": (Decoder, GPT2, 1, 1024),
    "gpt2-8x1024": (Decoder, GPT2, 8, 1024),
    "bert-1x128": (Encoder, BERT, 1, 128),
    "bert-32x128": (Encoder, BERT, 32, 128),
}
ANCHOR = "by hand"
#: Eager steps that are compared with each other by themselves.
PAIR = ("eager", "eager, tuned")
#: Of a turn of theirs, the steps that are timed and those before, since a policy's guards are cold in the second one.
PAIR_TURN = (2, 3)
#: What capture_graph may cost over the capture by hand, and a tuned policy over none.
CAPTURE_TARGET, TUNED_TARGET = 1.02, 1.01
WARM = 5

NORMS = Policy(kernels=KernelPolicy(layer_norm="cuda_raw.layer_norm"))
TUNED = Policy(
    kernels=KernelPolicy(matmul="auto", attention="auto", layer_norm="auto", auto_strategy="best_performance")
)


class Training:
    """A model, its optimizer and its loss, the same for every variant."""

    def __init__(self, kind: type, size: Size) -> None:
        torch.manual_seed(0)
        self.model = kind(size).cuda()
        rate = torch.tensor(1e-4, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True, capturable=True)
        self.loss: Callable[..., torch.Tensor] = self.forward
        self._beginning = {name: value.clone() for name, value in self.model.state_dict().items()}

    def restart(self) -> None:
        """Begin with the weights of the beginning, and an optimizer that has made no step."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        self.model.load_state_dict(self._beginning)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(self.model(tokens), wanted)

    def step(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(tokens, wanted)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Eager:
    """Steps as PyTorch runs them; a policy holds inside of ``with``."""

    def __init__(self, training: Training, policy: Policy | None) -> None:
        self._step = training.step
        self._held = None if policy is None else CompiledPolicy(policy)  # kept, so that the routes it has found are

    def __enter__(self) -> None:
        install_policy(self._held)

    def __exit__(self, *told: object) -> None:
        install_policy(None)

    def __call__(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return self._step(tokens, wanted)


def eager_under(policy: Policy | None) -> Callable[[Training, Batch], Step]:
    return lambda training, _: Eager(training, policy)


def pinned(training: Training, _: Batch) -> Step:
    def step(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return training.step(tokens, wanted)

    return step


def compiled(training: Training, _: Batch) -> Step:
    training.loss = torch.compile(training.forward)
    return training.step


def compiled_with_graphs(training: Training, _: Batch) -> Step:
    training.loss = torch.compile(training.forward, mode="reduce-overhead")

    def step(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return training.step(tokens, wanted)

    return step


class ByHand:
    """A graph that was captured by hand, with all that it works on.

    A graph holds the memory of what was made while it was captured, and nothing else: parameters and the optimizer's
    state have to be kept alive beside it.
    """

    def __init__(self, training: Training, graph: torch.cuda.CUDAGraph, inputs: Batch, loss: torch.Tensor) -> None:
        self.training = training
        self.graph = graph
        self.inputs = inputs
        self.loss = loss

    def __call__(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        static_tokens, static_wanted = self.inputs
        static_tokens.copy_(tokens)
        static_wanted.copy_(wanted)
        self.graph.replay()
        return self.loss


def by_hand(training: Training, batch: Batch) -> Step:
    """Capture as PyTorch's manual says."""
    static_tokens, static_wanted = (tensor.clone() for tensor in batch)
    saved = [p.detach().clone() for p in training.model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step(static_tokens, static_wanted)
    torch.cuda.current_stream().wait_stream(side)
    training.optimizer.zero_grad(set_to_none=True)
    # So that the workspace of cuBLAS lies in the graph's own memory: torch.compile with graphs, which is captured in
    # the same process, frees all workspaces, and one of a graph that is gone would be given back to the device.
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step(static_tokens, static_wanted)
    with torch.no_grad():
        for p, copy in zip(training.model.parameters(), saved):
            p.copy_(copy)
        for state in training.optimizer.state.values():
            for value in state.values():
                value.zero_()
    return ByHand(training, graph, (static_tokens, static_wanted), loss)


def captured(training: Training, batch: Batch) -> Step:
    return xrt_torch.capture_graph(
        training.forward, batch, optimizer=training.optimizer, modules=[training.model], strict=True
    )


#: Phase to its policy and its variants.
PHASES: dict[str, tuple[Policy | None, dict[str, Callable[..., Step]]]] = {
    "plain": (
        None,
        {
            ANCHOR: by_hand,
            "compile": compiled,
            "compile, reduce-overhead": compiled_with_graphs,
            "capture_graph": captured,
        },
    ),
    "eager": (
        None,
        {
            ANCHOR: by_hand,
            "eager": eager_under(None),
            "eager, flash pinned": pinned,
            "eager, xpuruntime norms": eager_under(NORMS),
            "eager, tuned": eager_under(TUNED),
        },
    ),
    "norms": (NORMS, {ANCHOR: by_hand, "capture_graph, xpuruntime norms": captured}),
    "tuned": (TUNED, {ANCHOR: by_hand, "capture_graph, tuned": captured}),
}
#: The policies of those variants, and of those phases, that have one.
POLICIES = {"norms": NORMS, "tuned": TUNED}


def rounds_of(
    steps: dict[str, Step], batches: list[tuple[Any, Any]], rounds: int, calls: int, settling: int
) -> dict[str, list[float]]:
    """Return milliseconds a step of each variant, one sample a round: the least of `calls` steps, each waited for.

    In the `settling` steps before them a policy gets to know the calls, and caches warm. Rounds have the variants
    in an order of their own, and Python collects its garbage between them alone.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps.items()), random.Random(0).shuffle
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(step: Step, batch: tuple[Any, Any]) -> float:
        start.record()
        step(*batch)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    gc.collect()
    gc.freeze()  # so that a collection is short
    gc.disable()
    try:
        for _ in range(rounds):
            gc.collect()
            shuffle(order)
            for name, step in order:
                with step if isinstance(step, Eager) else nullcontext():
                    for _ in range(settling):
                        step(*batches[0])
                    torch.cuda.synchronize()
                    samples[name].append(min(timed(step, batches[call % len(batches)]) for call in range(calls)))
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def phase(
    name: str, shape: str, wanted: set[str], rounds: int, pair_rounds: int, calls: int, layers: int | None
) -> list[dict[str, Any]]:
    """Measure the variants of one phase on one shape."""
    policy, variants = PHASES[name]
    chosen = {v: make for v, make in variants.items() if v in wanted or v == ANCHOR}
    kind, size, rows, tokens = SHAPES[shape]
    if layers:
        size = Size(layers, size.width, size.heads, size.words, size.positions)
    generator = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randint(size.words, (rows, tokens), generator=generator).cuda() for _ in range(2)) for _ in range(2)
    ]
    steps: dict[str, Step] = {}
    results: dict[str, dict[str, Any]] = {}
    training = step = shared = None
    try:
        for variant, make in chosen.items():  # the anchor first, without a policy
            if variant != ANCHOR and policy is not None and xrt_torch.get_kernel_policy() is None:
                xrt_torch.set_kernel_policy(policy)
            begun = time.perf_counter()
            row: dict[str, Any] = {"shape": shape, "phase": name, "variant": variant}
            results[variant] = row
            try:
                training = shared or Training(kind, size)
                if name == "eager" and variant != ANCHOR:
                    shared = training
                    shared.restart()
                step = make(training, batches[0])
                with step if isinstance(step, Eager) else nullcontext():
                    row["losses"] = [step(*batches[turn % 2]).item() for turn in range(WARM)]
                steps[variant] = step
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
                traceback.print_exc()
            torch.cuda.synchronize()
            row["prepare_s"] = time.perf_counter() - begun
        for variant, samples in rounds_of(steps, batches, rounds, calls, settling=3).items():
            row = results[variant]
            quantiles = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]]
            row |= {"ms": statistics.median(samples), "p10": quantiles[0], "p90": quantiles[-1], "samples_ms": samples}
        if steps.keys() >= set(PAIR):
            pair = {variant: steps[variant] for variant in PAIR}
            for variant, samples in rounds_of(pair, batches, pair_rounds, *PAIR_TURN).items():
                results[variant]["pair_samples_ms"] = samples
        _compare(list(results.values()))
    finally:
        xrt_torch.clear_kernel_policy()
        steps.clear()
        training = step = shared = None
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return list(results.values())


def _compare(rows: list[dict[str, Any]]) -> None:
    """Hold times and losses to those of the capture by hand."""
    anchor = next(row for row in rows if row["variant"] == ANCHOR)
    for row in rows:
        if "ms" not in row or "ms" not in anchor:
            continue
        row["to_anchor"] = row["ms"] / anchor["ms"]
        worst = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], anchor["losses"]))
        row["loss_drift"] = worst
        if worst > 0.02:
            row["error"] = f"losses {row['losses']} are not those of the capture by hand, {anchor['losses']}"


def listed(text: str | None, known: list[str], what: str) -> list[str]:
    """Return the names in a list with commas, checked; a comma inside of a name is written as ``;``."""
    if text is None:
        return known
    names = [name.strip().replace(";", ",") for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{what}: {', '.join(unknown)} not known; known are: {' | '.join(known)}")
    return names


def main() -> int:
    """Measure, write, print."""
    variants = list(dict.fromkeys(v for _, made in PHASES.values() for v in made))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="the JSON file; default: benchmarks/results/training_step.json")
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--phases", help=f"of {', '.join(PHASES)}; default: all")
    parser.add_argument("--variants", help="names, such as 'eager,compile; reduce-overhead'; default: all")
    parser.add_argument("--skip-compile", action="store_true", help="leave torch.compile out, which takes most time")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pair-rounds", type=int, default=400, help="of eager steps, without a policy and tuned")
    parser.add_argument("--calls", type=int, default=5, help="steps of a variant in a round")
    parser.add_argument("--quick", action="store_true", help="two layers and three rounds: does it run?")
    options = parser.parse_args()
    shapes = listed(options.shapes, list(SHAPES), "--shapes")
    phases = listed(options.phases, list(PHASES), "--phases")
    wanted = {v for v in listed(options.variants, variants, "--variants") if not (options.skip_compile and "comp" in v)}
    rounds, pair_rounds, layers = (3, 4, 2) if options.quick else (options.rounds, options.pair_rounds, None)
    warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    path = Path(options.out) if options.out else None
    for shape in shapes:
        for name in phases:
            if wanted & (set(PHASES[name][1]) - {ANCHOR}) or wanted == {ANCHOR}:
                rows += phase(name, shape, wanted, rounds, pair_rounds, options.calls, layers)
                print(f"{shape} {name}: {time.perf_counter() - begun:.0f} s so far", file=sys.stderr, flush=True)
                body = {
                    "dtype": "bfloat16 autocast, float32 weights",
                    "optimizer": "AdamW(fused, capturable)",
                    "rounds": rounds,
                    "pair_rounds": pair_rounds,
                    "calls": options.calls,
                    "quick": options.quick,
                    "policies": {name: policy.to_dict() for name, policy in POLICIES.items()},
                    "targets": {"capture_graph to by hand": CAPTURE_TARGET, "tuned to by hand": TUNED_TARGET},
                    "seconds": time.perf_counter() - begun,
                    "cases": rows,
                }
                write(path.stem if path else "training_step", body, str(path.parent) if path else None)
    return show(rows)


def show(rows: list[dict[str, Any]]) -> int:
    """Print one line a variant. Returns 1 where one failed."""
    print(f"{'shape':12} {'variant':26} {'ms':>8} {'p10':>8} {'p90':>8}  to by hand   drift of the loss")
    for row in rows:
        if "ms" in row:
            print(
                f"{row['shape']:12} {row['variant']:26} {row['ms']:8.3f} {row['p10']:8.3f} {row['p90']:8.3f}"
                f"  {row.get('to_anchor', float('nan')):10.3f}   {row.get('loss_drift', float('nan')):.1e}"
            )
        if "error" in row:
            print(f"{row['shape']:12} {row['variant']:26} FAILED: {row['error']}")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
