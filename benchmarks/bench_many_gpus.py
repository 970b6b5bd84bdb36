# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training steps of a Llama on 1 to N GPUs: DDP, FSDP2 and tensor-parallel layers; eager, compiled, captured, `auto`.

python benchmarks/bench_many_gpus.py --ranks 1,2,4,8
torchrun --nproc-per-node 2 benchmarks/bench_many_gpus.py --wraps fsdp2

Each number of ranks and each way to share the model has processes of its own, in which all variants run in interleaved
rounds; under torchrun, its processes measure what `--wraps` states. `--at-once` of them prepare side by side (import,
compile, capture), and then take turns: while one is timed, no other prepares or runs on its GPUs. Variants under a
policy have turns of their own, after all others were timed and written, as kernels are measured in them. Ranks that
need fewer GPUs than there are take their turn with others, on GPUs of their own.

A rank has as many rows at any number of ranks (weak scaling), apart from tensor-parallel layers, which share one batch
(strong scaling). A time is that of the slowest rank. Efficiency is the throughput of a GPU compared with one GPU under
the same variant. Losses of the first steps are compared with those of the eager step before anything is timed. What the
ranks' devices ran is from PyTorch's profiler: the share of NCCL's kernels in the time of all, and whether all ranks ran
the same kernels; algorithms and protocols are those that NCCL logs (rank 0 does).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import xpuruntime.pytorch as xrt_torch
from harness import write
from training_models import Llama, LlamaSize, loss_of
from xpuruntime.distributed import read_choices
from xpuruntime.measuring.rounds import rotated, timed
from xpuruntime.measuring.statistics import compare
from xpuruntime.policies import KernelPolicy
from xpuruntime.pytorch.compiler.compile_hooks import keep_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

AUTO = KernelPolicy(matmul="auto", auto_strategy="best_performance")
#: Name to how it is launched, and its policy.
VARIANTS: dict[str, tuple[str, KernelPolicy | None]] = {
    "eager": ("eager", None),
    "compile": ("compile", None),
    "captured": ("captured", None),
    "captured+auto": ("captured", AUTO),
    "compile+auto": ("compile", AUTO),
    "eager+auto": ("eager", AUTO),
}
WRAPS = ("ddp", "fsdp2", "tp")
#: Name to model, rows of a rank, tokens.
SIZES = {
    "quick": (LlamaSize(layers=2, width=64, heads=8, kv_heads=8, hidden=128, words=128), 2, 16),
    "small": (LlamaSize(), 4, 512),
    "medium": (LlamaSize(layers=16, width=2048, heads=32, kv_heads=8, hidden=5632), 4, 1024),
}
#: Of captured FSDP2 compared with compiled FSDP2 on the small model, and of efficiencies compared with eager ones.
CAPTURED_TARGET, EFFICIENCY_TARGET = 1.15, 0.97
#: The largest share by which losses of the first steps may differ from the eager ones.
LOSS_LIMIT = 0.02
CHECKED = 6


class Training:
    """A model that ranks share in one way, its optimizer and its loss; from the same weights each time."""

    def __init__(self, wrap: str, size: LlamaSize, tokens: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        with device:
            self.model: torch.nn.Module = Llama(size, tokens)
        if wrap == "ddp":
            # On a stream of its own, where its gradients are summed: a capture cannot have the default stream.
            with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
                self.model = DistributedDataParallel(self.model)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        elif wrap == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh)
        else:
            self._split(device)
        sharded = [p for p in self.model.parameters() if hasattr(p, "to_local")]
        others = [p for p in self.model.parameters() if not hasattr(p, "to_local")]  # a fused step takes one kind
        groups = [{"params": kind} for kind in (sharded, others) if kind]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def _split(self, device: torch.device) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
        columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
        plan = {**{name: ColwiseParallel() for name in columns},
                **{name: RowwiseParallel() for name in ("attention.out", "down")}}  # fmt: skip
        for layer in self.model.layers:
            parallelize_module(layer, mesh, plan)

    def loss(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return loss_of(self.model(tokens), wanted)

    def launched(self, launch: str, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
        """Return the step; a captured one is captured here, under the policy that holds."""
        if launch == "captured":
            return xrt_torch.capture_graph(
                self.loss, batch, optimizer=self.optimizer, modules=[self.model], make_capturable=True, compile=True,
                strict=self.device.type == "cuda",
            )  # fmt: skip
        loss_of_batch = torch.compile(self.loss) if launch == "compile" else self.loss

        def step(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            loss = loss_of_batch(tokens, wanted)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return step


def under(policy: KernelPolicy | None) -> Any:
    return nullcontext() if policy is None else xrt_torch.kernel_policy(policy)


def everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def kernels_of(step: Callable[[], Any], device: torch.device) -> dict[str, Any] | None:
    """Return microseconds of NCCL's and of other kernels of a step, and names with counts; ``None``: unobservable."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watch:
        step()
        torch.cuda.synchronize(device)
    collectives: Counter[str] = Counter()
    microseconds = {"nccl": 0.0, "other": 0.0}
    computing: Counter[str] = Counter()
    for event in watch.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith(("Memcpy", "Memset")):
            continue
        nccl = "nccl" in event.name.lower()
        microseconds["nccl" if nccl else "other"] += event.time_range.elapsed_us()
        (collectives if nccl else computing)[event.name.partition("(")[0]] += 1
    if not computing:
        return None
    return {"us": microseconds, "collectives": dict(collectives), "kernels": sorted(computing.items())}


def measured(
    options: argparse.Namespace, wrap: str, device: torch.device, written: Callable[[dict[str, Any]], None]
) -> None:
    """Prepare and time the variants on this number of ranks; rows are written as far as there are any."""
    size, rows, tokens = SIZES[options.size]
    world, rank = distributed.get_world_size(), distributed.get_rank()
    seeds = torch.Generator().manual_seed(1 if wrap == "tp" else 1 + rank)
    batches = [
        tuple(torch.randint(size.words, (rows, tokens), generator=seeds).to(device) for _ in range(2)) for _ in range(2)
    ]
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    plain = [name for name in options.variants if VARIANTS[name][1] is None]
    for turn, names in enumerate((plain, [name for name in options.variants if name not in plain])):
        if not names:
            continue
        if options.part and turn:  # kernels are measured in it
            take_turn(Path(options.part), turn)
        for name in names:
            row, step = prepared(name, wrap, options.size, device, batches)
            found[name] = row
            if "error" in found["eager"]:  # there is nothing to compare with
                written(found)
                return
            if "error" in row:
                continue
            worst = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], found["eager"]["losses"], strict=True))
            row["loss_difference"] = max(everywhere(worst))
            if row["loss_difference"] > LOSS_LIMIT:
                row["error"] = f"losses differ from eager ones by {row['loss_difference']:.2g}"
            elif step is not None:
                steps[name] = step
        if options.part and not turn:
            take_turn(Path(options.part), turn)
        if options.rounds:
            time_steps(options, steps, found, batches[1], device)
            for row in found.values():
                if "samples_ms" in row:
                    rate = tokens * rows * (1 if wrap == "tp" else world)
                    row["tokens_per_second"] = rate / statistics.median(row["samples_ms"]) * 1e3
        written(found)
    for step in steps.values():  # NCCL waits for graphs of its operations when the process group ends
        if hasattr(step, "reset"):
            step.reset()


def prepared(
    name: str, wrap: str, size: str, device: torch.device, batches: list[Any]
) -> tuple[dict[str, Any], Step | None]:
    """Return the row of a variant with the losses of its first steps, and its step; an error is that of all ranks."""
    launch, policy = VARIANTS[name]
    row: dict[str, Any] = {}
    begun, failure, step, before = time.perf_counter(), "", None, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    try:
        with under(policy):
            step = Training(wrap, SIZES[size][0], SIZES[size][2], device).launched(launch, batches[0])
            row["losses"] = [float(step(*batches[turn % 2])) for turn in range(CHECKED)]
    except Exception as error:
        failure = f"rank {distributed.get_rank()}: {type(error).__name__}: {error}"[:400]
        traceback.print_exc()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        row["peak_bytes"] = everywhere(torch.cuda.max_memory_allocated(device) - before)
    row["prepare_s"] = time.perf_counter() - begun
    if failures := [text for text in everywhere(failure) if text]:
        row["error"] = "; ".join(failures)
    return row, step


def take_turn(part: Path, turn: int) -> None:
    """Say that this rank is ready for its turn, and wait for it."""
    part.with_suffix(f".ready-{turn}-{distributed.get_rank()}").touch()
    while not part.with_suffix(f".turn-{turn}").exists():
        time.sleep(0.02)


def time_steps(
    options: argparse.Namespace,
    steps: dict[str, Step],
    found: dict[str, dict[str, Any]],
    batch: Any,
    device: torch.device,
) -> None:
    """Time the steps in interleaved rounds, then profile each; into their rows."""
    finish = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
    samples: dict[str, list[float]] = {name: [] for name in steps}
    with keep_compiled():
        gc.collect()
        gc.disable()
        samplers = {name: timed(lambda step=step: step(*batch), finish) for name, step in steps.items()}
        for number in range(-1, options.rounds):
            for name in rotated(list(steps), max(number, 0)):
                with under(VARIANTS[name][1]):
                    samplers[name](2, 1)  # what follows a change of policy is no step's time
                    seconds = samplers[name](options.calls, 1)[0] / options.calls
                if number >= 0:
                    samples[name].append(seconds)
        gc.enable()
        for name, step in steps.items():
            with under(VARIANTS[name][1]):
                ran = everywhere(kernels_of(lambda step=step: step(*batch), device))
            row = found[name]
            row["samples_ms"] = [1e3 * max(times) for times in zip(*everywhere(samples[name]), strict=True)]
            if all(ran):
                row["collectives_share"] = [one["us"]["nccl"] / sum(one["us"].values()) for one in ran]
                row["collectives"] = ran[0]["collectives"]
                row["same_kernels"] = all(one["kernels"] == ran[0]["kernels"] for one in ran)
                if not row["same_kernels"]:
                    row["kernels"] = [one["kernels"] for one in ran]
            else:
                row["collectives_share"] = "unobservable"


def in_ranks(options: argparse.Namespace) -> None:
    """Measure in the processes that torchrun has started; rank 0 writes."""
    warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    log = Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid())))
    wraps: dict[str, Any] = {}
    body = {
        "ranks": world,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        "choices": {},
        "wraps": wraps,
    }
    seen = 0
    for wrap in options.wraps:

        def written(found: dict[str, Any], wrap: str = wrap) -> None:
            wraps[wrap] = found
            if rank == 0 and options.part:
                place = Path(options.part)
                place.with_suffix(".new").write_text(json.dumps(body))
                place.with_suffix(".new").replace(place)

        with xrt_torch.RankAgreement(rank_timeout=600):
            measured(options, wrap, device, written)
        if cuda and log.is_file():
            logged = read_choices(log)
            body["choices"][wrap] = Counter(
                f"{entry.collective}: {entry.algorithm}, {entry.protocol}" for entry in logged[seen:]
            )
            seen = len(logged)
            written(wraps[wrap])
    if rank == 0 and not options.part:
        show(save(options, [body]))
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # the end of a process group waits for whatever still has a graph of its operations


class World:
    """Processes that measure, a rank each, on GPUs from one on; what they have written."""

    def __init__(
        self, options: argparse.Namespace, ranks: int, wraps: list[str], folder: Path, first: int = 0,
        log: Path | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.wraps, self.variants = ranks, wraps, options.variants
        self.late: list[int] = []
        self.part = folder / f"{ranks}-{'-'.join(wraps)}{'-logged' if log else ''}.json"
        logged = {}
        if log:
            self.part.with_suffix(".turn-0").touch()
            logged = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": str(log)}
        command = [
            sys.executable, __file__, "--wraps", ",".join(wraps), "--part", str(self.part), "--size", options.size,
            "--device", options.device, "--variants", ",".join(options.variants), "--rounds", str(options.rounds),
            "--calls", str(options.calls),
        ]  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        threads = str(max(1, (os.cpu_count() or 1) // (ranks * options.at_once)))
        self.processes = [
            subprocess.Popen(command, env={
                "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ, "OMP_NUM_THREADS": threads, **logged,
                "RANK": str(rank), "LOCAL_RANK": str(first + rank), "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            })
            for rank in range(ranks)
        ]  # fmt: skip

    def ended(self) -> bool:
        """Say whether all ranks have ended; where one failed, the others are ended."""
        codes = [process.poll() for process in self.processes]
        if any(codes):
            self.end()
        return None not in codes

    def ready(self, turn: int = 0) -> bool:
        """Say whether all ranks are ready for a turn."""
        return all(self.part.with_suffix(f".ready-{turn}-{rank}").exists() for rank in range(self.ranks))

    def end(self) -> None:
        """Kill what is left of it."""
        self.late += [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def read(self) -> dict[str, Any]:
        """Return what it has written so far, with an error for each variant that is not in it."""
        codes = [process.poll() for process in self.processes]
        error = f"the ranks ended with {codes}" if None not in codes else "not measured in time"
        if self.late:
            error = f"not measured in time: ranks {self.late} were ended"
        found = json.loads(self.part.read_text()) if self.part.exists() else {"ranks": self.ranks, "wraps": {}}
        for wrap in self.wraps:
            rows = found["wraps"].setdefault(wrap, {})
            for name in self.variants:
                rows.setdefault(name, {"error": error})
        return found


def awaited(worlds: list[World], done: Callable[[World], bool], until: float) -> None:
    """Wait until all of them are done or have ended, or it is too late."""
    states = [False]
    while time.monotonic() < until and not all(states):
        time.sleep(0.02)
        states = [world.ended() or done(world) for world in worlds]


def started(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start processes for each number of ranks and way to share the model, and return what they wrote.

    What there is is written after each turn. NCCL's log costs the host time, so that the processes that write it time
    nothing, and have ended before others are timed.
    """
    until = time.monotonic() + options.budget
    gpus = max(torch.cuda.device_count() if options.device == "cuda" else 0, *options.ranks, 1)
    turns: list[list[tuple[int, str]]] = []  # who is timed at the same time, on GPUs of its own
    for case in ((ranks, wrap) for ranks in options.ranks for wrap in options.wraps):
        if turns and sum(ranks for ranks, _ in turns[-1]) + case[0] <= gpus:
            turns[-1].append(case)
        else:
            turns.append([case])
    parts: list[dict[str, Any]] = []
    choices: dict[int, dict[str, Any]] = {}
    plain = argparse.Namespace(**{**vars(options), "variants": ["eager"], "rounds": 0})
    with tempfile.TemporaryDirectory() as place:
        for number in range(0, len(turns), options.at_once):
            batch = turns[number : number + options.at_once]
            loggers = [
                World(plain, ranks, options.wraps, Path(place), log=Path(place, f"{ranks}-%p.log"))
                for ranks in dict.fromkeys(ranks for turn in batch for ranks, _ in turn)
                if ranks > 1 and ranks not in choices and options.device == "cuda"
            ]
            groups = [
                [
                    World(options, ranks, [wrap], Path(place), first=sum(before for before, _ in turn[:index]))
                    for index, (ranks, wrap) in enumerate(turn)
                ]
                for turn in batch
            ]
            worlds = [world for group in groups for world in group]
            late = min(time.monotonic() + options.seconds, until)
            awaited(worlds, World.ready, late)
            awaited(loggers, World.ended, late)
            choices |= {logger.ranks: logger.read().get("choices", {}) for logger in loggers}
            for world in (*loggers, *(world for world in worlds if not world.ready())):
                world.end()
            print(f"prepared by {options.budget - until + time.monotonic():.0f} s", file=sys.stderr, flush=True)
            for turn in (0, 1):
                for group in groups:
                    for world in group:
                        world.part.with_suffix(f".turn-{turn}").touch()
                    ready = partial(World.ready, turn=turn + 1)
                    awaited(group, ready, min(time.monotonic() + options.turn, until))
                    read = [{**world.read(), "choices": choices.get(world.ranks, {})} for world in worlds]
                    save(options, parts + read)
                    took = options.budget - until + time.monotonic()
                    names = ", ".join(f"{world.ranks} {world.wraps[0]}" for world in group)
                    print(f"turn {turn} of {names} ended by {took:.0f} s", file=sys.stderr, flush=True)
            for world in worlds:
                world.end()
            parts += [{**world.read(), "choices": choices.get(world.ranks, {})} for world in worlds]
    return parts


def merged(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each number of ranks, way and variant, with its efficiency and its ratio to compiled code."""
    rows = [
        {
            "ranks": part["ranks"],
            "wrap": wrap,
            "variant": name,
            "choices": part.get("choices", {}).get(wrap, "unobservable"),
            **row,
        }
        for part in parts
        for wrap, variants in part["wraps"].items()
        for name, row in variants.items()
    ]
    timed_rows = {(row["ranks"], row["wrap"], row["variant"]): row for row in rows if "samples_ms" in row}
    for (ranks, wrap, name), row in timed_rows.items():
        if single := timed_rows.get((1, wrap, name)):
            row["efficiency"] = row["tokens_per_second"] / ranks / single["tokens_per_second"]
        if (compiled := timed_rows.get((ranks, wrap, "compile"))) and name != "compile":
            found = compare(row["samples_ms"], compiled["samples_ms"])
            row["faster_than_compile"] = [1 / found.ratio, 1 / found.high, 1 / found.low]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    print(
        f"{'ranks':>5} {'wrap':6} {'variant':14} {'ms':>8} {'tokens/s':>9} {'efficiency':>10} "
        f"{'of compile':>22} {'MiB a rank':>11} {'NCCL':>6} same kernels"
    )
    for row in rows:
        begin = f"{row['ranks']:>5} {row['wrap']:6} {row['variant']:14}"
        if "error" in row or "samples_ms" not in row:
            print(f"{begin} FAILED: {row.get('error', 'not timed')}")
            continue
        ratio = row.get("faster_than_compile")
        shown = "" if ratio is None else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"
        memory = f"{max(row['peak_bytes']) / 2**20:.0f}" if "peak_bytes" in row else ""
        share = row["collectives_share"]
        nccl = share[:5] + "." if isinstance(share, str) else f"{max(share):.1%}"
        efficiency = f"{row['efficiency']:.3f}" if "efficiency" in row else ""
        print(
            f"{begin} {statistics.median(row['samples_ms']):8.3f} {row['tokens_per_second']:9.0f} {efficiency:>10} "
            f"{shown:>22} {memory:>11} {nccl:>6} {row.get('same_kernels', 'unobservable')}"
        )
    for ranks, wrap, choices in dict.fromkeys((r["ranks"], r["wrap"], json.dumps(r["choices"])) for r in rows):
        print(f"{ranks} ranks, {wrap}: NCCL ran {choices}")


def save(options: argparse.Namespace, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the result, and return its rows."""
    first = next((part for part in parts if "device" in part), {})
    rows = merged(parts)
    body = {
        "size": options.size, "rounds": options.rounds, "calls": options.calls, "device": first.get("device"),
        "nccl": first.get("nccl"), "nvls": os.environ.get("NCCL_NVLS_ENABLE", "not stated"),
        "targets": {"captured FSDP2 to compiled": CAPTURED_TARGET, "efficiency to eager": EFFICIENCY_TARGET},
        "cases": rows,
    }  # fmt: skip
    write("many_gpus" if options.size == "small" else f"many_gpus_{options.size}", body, options.out)
    return rows


def listed(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    """Measure, write, print. Returns 1 where a variant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2])
    parser.add_argument("--wraps", type=listed, default=list(WRAPS), help=f"of {', '.join(WRAPS)}")
    parser.add_argument("--variants", type=listed, default=list(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=5, help="steps of a variant in a round")
    parser.add_argument("--seconds", type=float, default=300, help="the most that processes may prepare")
    parser.add_argument("--turn", type=float, default=300, help="the most seconds for a turn")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which all processes are ended")
    parser.add_argument("--at-once", type=int, default=1, help="turns whose processes prepare side by side")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: does it run?")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.wraps} - {*WRAPS} | {*options.variants} - {*VARIANTS}:
        raise SystemExit(f"{', '.join(sorted(unknown))} not known; wraps: {WRAPS}; variants: {tuple(VARIANTS)}")
    if "eager" not in options.variants:
        options.variants.insert(0, "eager")  # losses are compared with its
    if options.quick:
        options.size, options.rounds = "quick", 2
    if "RANK" in os.environ:
        in_ranks(options)
        return 0
    rows = save(options, started(options))
    show(rows)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
