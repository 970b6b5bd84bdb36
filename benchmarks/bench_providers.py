# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of other packages through a policy, beside PyTorch's, Inductor's, this library's and a copy; and `auto`.

python benchmarks/bench_providers.py [--only cross_entropy,rms_norm,attention,masked,adapter] [--quick]

A kernel is compared with float64 before it is timed, by the canary. Cases of a row run in turns. A package that is not
installed is said so, and its rows are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_attention import Shape
from gpu_timing import graph_times, medians, sets_for
from harness import write
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.measuring.statistics import paired_ratio
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.printable import error_line
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.policy_scope import install_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: `auto` to the best of the others; a norm to a copy of its bytes.
BEHIND_BEST, OVER_COPY = 1.02, 1.06
#: Microseconds of an eager cross entropy of 8192 x 32000 bf16, forward and backward.
CROSS_ENTROPY_US = 816.0
ADAPTER_US = 1.0
NORMS = ((8192, 4096), (65536, 768), (4096, 8192))
DTYPE = torch.bfloat16

SHAPES = (
    Shape(4, 16, 16, 4096, 128, True),
    Shape(4, 32, 8, 4096, 128, True),
    Shape(1, 16, 16, 16384, 128, True),
    Shape(8, 12, 12, 1024, 64, True),
    Shape(2, 24, 24, 4096, 128, False),
    Shape(8, 16, 16, 512, 64, False),
    Shape(1, 32, 8, 32768, 128, True),
)
MASKED = (
    Shape(2, 8, 8, 256, 64, False),
    Shape(4, 12, 12, 512, 64, False),
    Shape(4, 12, 12, 1024, 64, False),
    Shape(4, 16, 16, 2048, 128, False),
)
#: Those of attention with masks; `auto` is the last.
MODES = ("torch", "cudnn", "efficient", "auto")
#: The largest part of the largest number by which bf16 may differ.
DIFFERS = 0.02


class Under:
    """A function that runs under a policy, which holds inside of ``with`` and in each call outside of it."""

    def __init__(self, run: Callable[[], Any], policy: KernelPolicy | None = None) -> None:
        self.run = run
        self.held = None if policy is None else CompiledPolicy(Policy(kernels=policy, mode="strict"))

    def __enter__(self) -> None:
        if self.held is not None and torch.cuda.is_current_stream_capturing():
            self.held.forget_tuned()  # in a graph, the time on the device decides
        install_policy(self.held)

    def __exit__(self, *_: object) -> None:
        install_policy(None)

    def __call__(self) -> Any:
        with self:
            return self.run()


def named(op: str, word: str) -> KernelPolicy:
    return KernelPolicy(**{op: word})


def fastest(op: str) -> KernelPolicy:
    return KernelPolicy(**{op: "auto"}, auto_strategy="best_performance")


def that_run(cases: dict[str, Under], row: dict[str, Any]) -> dict[str, Under]:
    """Return the cases that serve, and keep the seconds of each first call, in which kernels are compiled."""
    kept = {}
    row["first_call_s"], row["refused"] = {}, {}
    for name, case in cases.items():
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case()
                torch.cuda.synchronize()
        except (RuntimeError, UnsupportedOperationError) as error:
            row["refused"][name] = error_line(error)[:300]
            print(f"  {name} does not serve: {error_line(error)[:200]}", flush=True)
            continue
        row["first_call_s"][name] = time.perf_counter() - begun
        kept[name] = case
    return kept


def eager_times(cases: dict[str, Under], *, rounds: int, milliseconds: float = 6.0) -> dict[str, list[float]]:
    """Return microseconds a call, one sample a round, by events around calls whose policy is held."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    counts: dict[str, int] = {}
    for number in range(-1, rounds):
        names = list(cases)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            count = counts.get(name, 2)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with cases[name]:
                for _ in range(3):
                    cases[name].run()
                start.record()
                for _ in range(count):
                    cases[name].run()
                end.record()
            end.synchronize()
            microseconds = start.elapsed_time(end) / count * 1e3
            if number < 0:
                counts[name] = max(2, min(200, round(milliseconds * 1e3 / microseconds)))
            else:
                samples[name].append(microseconds)
    return samples


def behind_best(times: dict[str, float], rivals: tuple[str, ...]) -> float:
    """Return the time of `auto` over the least of the others."""
    least = min((times[name] for name in rivals if name in times), default=float("nan"))
    return times.get("auto", float("nan")) / least


def cross_entropy_rows(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    rows, classes = (512, 1024) if quick else (8192, 32000)
    logits = torch.randn(rows, classes, device="cuda", dtype=DTYPE).requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")

    def loss(values: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(values, target)

    def step(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(logits), logits)

    def wide(values: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(values.float(), target)

    cases = {
        "torch fp32": Under(step(wide)),
        "torch bf16": Under(step(loss)),
        "quack": Under(step(loss), named("cross_entropy", "quack.cross_entropy")),
        "liger": Under(step(loss), named("cross_entropy", "liger.cross_entropy")),
        "auto": Under(step(loss), fastest("cross_entropy")),
    }
    row: dict[str, Any] = {"what": "cross entropy, forward and backward", "rows": rows, "columns": classes}
    row["eager_us"] = eager_times(that_run(cases, row), rounds=rounds)
    row["bars"] = {"auto": (medians(row["eager_us"]).get("auto", float("nan")), CROSS_ENTROPY_US)}
    yield row
    row = {"what": "cross entropy, compiled", "rows": rows, "columns": classes}
    compiled = step(torch.compile(wide, dynamic=False))
    kept = that_run({"inductor": Under(compiled), "auto": Under(compiled, fastest("cross_entropy"))}, row)
    row["samples_us"] = graph_times({name: [case] for name, case in kept.items()}, rounds=rounds)
    row["bars"] = {"auto over inductor": (behind_best(medians(row["samples_us"]), ("inductor",)), BEHIND_BEST)}
    yield row


def norm_rows(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    compiled = torch.compile(lambda x, w: functional.rms_norm(x, (x.shape[-1],), w, 1e-6), dynamic=False)
    for rows, columns in NORMS[:1] if quick else NORMS:
        count = sets_for(4 * rows * columns)
        inputs = [torch.randn(rows, columns, device="cuda", dtype=DTYPE) for _ in range(count)]
        outs = [torch.empty_like(x) for x in inputs]
        weight = torch.randn(columns, device="cuda", dtype=DTYPE)
        policies = {
            "torch": None,
            "own": named("rms_norm", "cuda_raw.rms_norm"),
            "quack": named("rms_norm", "quack.rms_norm"),
            "liger": named("rms_norm", "liger.rms_norm"),
            "auto": fastest("rms_norm"),
        }

        def norm(x: torch.Tensor = inputs[0], weight: torch.Tensor = weight, columns: int = columns) -> torch.Tensor:
            return functional.rms_norm(x, (columns,), weight, 1e-6)

        row: dict[str, Any] = {"what": "rms norm", "rows": rows, "columns": columns}
        kept = that_run({name: Under(norm, policy) for name, policy in policies.items()}, row)
        cases: dict[str, Any] = {
            "copy": [lambda x=x, o=o: o.copy_(x) for x, o in zip(inputs, outs)],
            "inductor": [lambda x=x, w=weight: compiled(x, w) for x in inputs],
        }
        for name, case in kept.items():
            cases[name] = [_with_policy(case, lambda x=x, norm=norm: norm(x)) for x in inputs]
        row["samples_us"] = graph_times(cases, rounds=rounds)
        times = medians(row["samples_us"])
        row["eager_us"] = eager_times(kept, rounds=rounds)
        rivals = ("torch", "own", "quack", "liger", "inductor")
        row["bars"] = {
            "auto over the best": (behind_best(times, rivals), BEHIND_BEST),
            "auto over a copy": (times.get("auto", float("nan")) / times["copy"], OVER_COPY),
            "eager auto over the best": (behind_best(medians(row["eager_us"]), rivals[:4]), BEHIND_BEST),
        }
        yield row
        del inputs, outs
        torch.cuda.empty_cache()


def _with_policy(case: Under, run: Callable[[], Any]) -> Callable[[], Any]:
    def held() -> Any:
        with case:
            return run()

    return held


def attention_rows(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    for shape in SHAPES[3:4] if quick else SHAPES:
        q, k, v, g = (
            torch.randn(shape.batch, heads, shape.length, shape.head_dim, device="cuda", dtype=DTYPE)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        policies = {
            "cudnn": named("attention", "torch.cudnn"),
            "fa2": named("attention", "torch.flash"),
            "own": named("attention", "cuda_raw.flash_attention_v2"),
            "fa4": named("attention", "fa4.attention"),
            "auto": fastest("attention"),
        }

        def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, shape: Shape = shape) -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

        def forward(attend: Callable[[], torch.Tensor] = attend) -> Any:
            with torch.no_grad():
                return attend()

        def both(attend: Callable[[], torch.Tensor] = attend, leaves: Any = leaves, g: torch.Tensor = g) -> Any:
            return torch.autograd.grad(attend(), leaves, g)

        for what, run, products in (("forward", forward, 2), ("forward and backward", both, 7)):
            if what != "forward" and shape.length > 16384:
                continue
            row: dict[str, Any] = {"what": f"attention, {what}", **shape._asdict(), "flop": shape.flops(products)}
            kept = that_run({name: Under(run, policy) for name, policy in policies.items()}, row)
            row["eager_us"] = eager_times(kept, rounds=rounds)
            rivals = ("cudnn", "fa2", "own", "fa4")
            row["bars"] = {"eager auto over the best": (behind_best(medians(row["eager_us"]), rivals), BEHIND_BEST)}
            with contextlib.suppress(RuntimeError):  # what cannot be captured is in the eager row alone
                row["samples_us"] = graph_times({name: [case] for name, case in kept.items()}, rounds=rounds)
                share = behind_best(medians(row["samples_us"]), rivals)
                row["bars"]["captured auto over the best"] = (share, BEHIND_BEST)
            yield row
            torch.cuda.empty_cache()


def masked_rows(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield compiled attention with boolean masks that hide all keys from some queries, each mode in its own process.

    `torch` is PyTorch's own choice, `cudnn` and `efficient` are kernels of PyTorch's by `sdpa_kernel`. What a mode
    computes is compared with float64: PyTorch 2.10 and 2.11 are wrong by cuDNN. Processes of the same code differ by a
    third where the host is what is waited for, and by 3 % on the device: `auto` is timed in turns with `torch`, in one
    process, and is slower where the whole interval says so.
    """
    # What is kept on disk of a graph is not told apart by `sdpa_kernel`.
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, __file__, "--rounds", str(rounds), *["--quick"] * quick, "--mode"]
    found = {}
    for mode in MODES:
        run = subprocess.run([*command, mode], stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found[mode] = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    for cases in zip(*found.values(), strict=True):
        row = {key: value for key, value in cases[0].items() if not isinstance(value, dict)}
        for kind in ("first_call_s", "refused", "samples_us", "eager_us", "differs"):
            row[kind] = {name: value for case in cases for name, value in case[kind].items()}
        far = row["differs"].get("auto")
        row["bars"] = {"auto from float64": (math.nan if far is None else far, DIFFERS)}
        for way, kind in (("captured", "samples_us"), ("called", "eager_us")):
            turns = [row[kind][name] for name in ("auto", "torch beside auto") if name in row[kind]]
            row[way] = list(paired_ratio(*turns)) if len(turns) == 2 else [math.nan] * 3
            row["bars"][f"{way}, auto over torch, at least"] = (row[way][1], BEHIND_BEST)
        row["chosen_by"] = cases[-1]["chosen_by"]
        yield row


def masked_mode(mode: str, rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of one mode, of which this process measures no other."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    policy = fastest("attention") if mode == "auto" else None
    for shape in MASKED[:1] if quick else MASKED:
        q, k, v, g = (
            torch.randn(shape.batch, shape.heads, shape.length, shape.head_dim, device="cuda", dtype=DTYPE)
            for _ in range(4)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask = torch.rand(shape.batch, 1, shape.length, shape.length, device="cuda") < 0.8
        mask[0, :, :3] = False
        wide = [x.detach().double().requires_grad_() for x in leaves]
        exact = functional.scaled_dot_product_attention(*wide, mask)
        exact = [exact.detach(), *torch.autograd.grad(exact, wide, g.double())]
        for what, products in (("forward", 2), ("forward and backward", 7)):
            torch.compiler.reset()

            def attention(*operands: torch.Tensor) -> torch.Tensor:
                return functional.scaled_dot_product_attention(*operands)

            attend = torch.compile(attention, dynamic=False)

            def run(what: str = what, attend: Any = attend, leaves: Any = leaves, mask: Any = mask, g: Any = g) -> Any:
                with torch.set_grad_enabled(what != "forward"):
                    out = attend(*leaves, mask)
                    return [out, *(torch.autograd.grad(out, leaves, g) if out.requires_grad else ())]

            row: dict[str, Any] = {
                "what": f"masked attention, compiled, {what}", **shape._asdict(), "flop": shape.flops(products),
            }  # fmt: skip
            with sdpa_kernel(backends[mode]) if mode in backends else contextlib.nullcontext():
                kept = that_run({mode: Under(run, policy)}, row)
                row["differs"] = {name: differs(case(), exact) for name, case in kept.items()}
                beside = {"torch beside auto": Under(run)} if mode == "auto" else {}
                cases = kept | beside if kept else {}
                row["eager_us"] = eager_times(cases, rounds=rounds)
                row["samples_us"] = graph_times({name: [case] for name, case in cases.items()}, rounds=rounds)
            yield {**row, "chosen_by": chosen_by()}
        del exact, wide
        torch.cuda.empty_cache()


def differs(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float | None:
    """Return the largest difference from float64 in parts of the largest number; ``None`` where one is NaN."""
    parts = [float((x.detach().double() - y).abs().max() / y.abs().max()) for x, y in zip(results, exact)]
    return None if any(map(math.isnan, parts)) else max(parts)


def adapter_rows(rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield what the host needs for a call of a norm class whose policy leaves it to the class."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type] - it need not fit this PyTorch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(64).to("cuda", DTYPE)
    x = torch.randn(4, 64, device="cuda", dtype=DTYPE)
    cases = {"bare": Under(lambda: norm(x)), "adapted": Under(lambda: norm(x), named("rms_norm", "torch"))}
    row: dict[str, Any] = {"what": "class adapter, host", "calls": 100 if quick else 1000}
    kept = that_run(cases, row)
    samples: dict[str, list[float]] = {name: [] for name in kept}
    for _ in range(rounds):
        for name, case in kept.items():
            with torch.no_grad(), case:
                start = time.perf_counter()
                for _ in range(row["calls"]):
                    case.run()
                samples[name].append((time.perf_counter() - start) / row["calls"] * 1e6)
            torch.cuda.synchronize()
    row["samples_us"] = samples
    times = medians(samples)
    row["bars"] = {"microseconds over bare": (times["adapted"] - times["bare"], ADAPTER_US)}
    yield row


def chosen_by() -> dict[str, Any]:
    """Return the times by which `auto` has chosen, and what the way to another kernel costs, in microseconds."""
    kinds = {
        f"{op};{key};{'eager' if eager else 'captured'}": [candidate._asdict() for candidate in found.candidates]
        for (op, key, eager), found in CONTEXT.times.items()
    }
    return {"times": kinds, "route_us": {";".join(mark): cost * 1e6 for mark, cost in CONTEXT.route_costs.items()}}


SECTIONS = {
    "cross_entropy": cross_entropy_rows,
    "rms_norm": norm_rows,
    "attention": attention_rows,
    "masked": masked_rows,
    "adapter": adapter_rows,
}


def show(row: dict[str, Any]) -> list[str]:
    """Print a row and return what missed its bar."""
    sizes = "x".join(str(row[name]) for name in ("batch", "heads", "kv_heads", "length", "head_dim", "rows", "columns",
                                                 "causal") if name in row)  # fmt: skip
    missed = []
    for kind in ("samples_us", "eager_us"):
        if kind in row:
            times = "  ".join(f"{name} {statistics.median(samples):.1f}" for name, samples in row[kind].items())
            print(f"{row['what']:32} {sizes:28} {'eager' if kind == 'eager_us' else '':6} us  {times}")
    if "differs" in row:
        print("  from float64: " + "  ".join(f"{name} {far or math.nan:.4f}" for name, far in row["differs"].items()))
    jit = "  ".join(f"{name} {seconds:.1f}" for name, seconds in row["first_call_s"].items() if seconds >= 1)
    if jit:
        print(f"  first calls, s: {jit}")
    for name, (found, bar) in row["bars"].items():
        if not found <= bar:
            missed.append(f"{row['what']} {sizes}: {name} is {found:.3f}, and {bar} is the bar")
            print(f"  MISSED: {name} {found:.3f} > {bar}")
    sys.stdout.flush()
    return missed


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one row of each: does it run?")
    parser.add_argument("--mode", choices=MODES, help="print the masked rows of one mode as lines of JSON")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    torch.manual_seed(0)
    if options.mode:
        for row in masked_mode(options.mode, rounds, options.quick):
            print(json.dumps(row), flush=True)
        return 0
    rows, missed = list[dict[str, Any]](), list[str]()
    for name in options.only.split(","):
        for row in SECTIONS[name](rounds, options.quick):
            rows.append(row)
            missed += show(row)
            body = {"dtype": "bfloat16", "cases": rows, "missed": missed, "chosen_by": chosen_by()}
            write("providers_cuda", body, options.out)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
