# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tokens of random Llama-shaped models by plain ``generate`` and by captured steps, each way in a process of its own.

python benchmarks/bench_generation.py --cases 1b:1 1b:8 1b:32 7b:1 --ahead --seconds 480

``token`` is ``generate`` end to end without the first token, ``step`` the replay of one graph, and ``floor`` the time
in which weights and cache are read at the rate of a copy. ``top1`` is how often the plain model, given the same text,
chooses the same token: tokens of bf16 need not be equal. ``--ahead`` compiles all ways at once before any is timed;
``--seconds`` starts none after that time, and what is left out is named.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import types
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

# The second asks for CUDA devices when it is imported, after which forked processes have none.
sys.modules.update({"torchvision": None, "torchao": None})  # type: ignore[dict-item]

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}  # fmt: skip
PROMPT, TOKENS = 128, 256
#: Of ways whose tokens take the host long, which is the same whatever the length of the text.
FEW = 64
#: Replays of one graph that are timed, first tokens, and tokens of which kernels are listed.
STEPS, FIRSTS, LISTED = 100, 25, 32
#: Options of `capture_decode`; others are no captures of ours.
CAPTURED: dict[str, dict[str, Any]] = {
    "fused": {},
    "captured": {"fuse": False, "compile": False},
    "compiled": {"fuse": False},
    "joined": {"tolerance": 0.0},
    "fused-eager-choice": {"compile": False},
    "loop": {"fuse": False, "compile": False},
}
MODES = ("fused", "plain", "static", "anchor", "captured", "loop", "compiled", "joined", "fused-eager-choice",
         "static-eager")  # fmt: skip
#: Of the table that is asked for, in the order of what it can do without least.
USUAL = MODES[:6]
#: Ways of `FEW` tokens and two timings, and ways whose kernels are listed.
SLOW, PROFILED = ("plain", "static-eager", "loop"), ("fused", "anchor")
#: Modules that each process begins with, since importing them takes longer than most of what is timed.
PRELOADED = ("bench_generation", "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama")
#: On an NVIDIA H200: microseconds a step of one row, a step of more rows over that of one, a step over reading weights
#: and cache, the first token over that of plain ``generate``, and the peak of memory over that of a static cache.
TARGETS = {
    "step_us": {"1b": 650.0},
    "of_one_row": {"8": 1.15, "32": 1.4},
    "of_floor": {"7b": 1.333},
    "first": 1.02,
    "memory": 1.05,
}


def model_of(shape: str, device: str) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0, **SHAPES[shape]
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Any, device: str) -> float:
    sync(device)
    start = time.perf_counter()
    call()
    sync(device)
    return time.perf_counter() - start


class Anchor:
    """A step that ``torch.compile`` tunes for itself, captured by hand: greedy, no end, no padding."""

    def __init__(self, model: Any, batch: int, device: str) -> None:
        import transformers

        self._model = model
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + TOKENS)
        self._token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._position = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._graph_of = None if device == "cpu" else torch.cuda.CUDAGraph
        self.graph: Any = None

    def _step(self) -> None:
        made = self._model(self._token, position_ids=self._position, past_key_values=self._cache, use_cache=True)
        self._token.copy_(made.logits[:, -1:].argmax(-1))
        self._position.add_(1)

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        del options
        self._cache.reset()
        logits = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self._token.copy_(logits[:, -1:].argmax(-1))
        self._position.fill_(ids.shape[1])
        made = [ids, self._token.clone()]
        if self.graph is None and max_new_tokens > 1:
            self._capture()
            return self.generate(ids, max_new_tokens)
        for _ in range(max_new_tokens - 1):
            self.graph.replay()
            made.append(self._token.clone())
        return torch.cat(made, 1)

    def _capture(self) -> None:
        step = torch.compile(self._step, mode="max-autotune-no-cudagraphs")
        if self._graph_of is None:  # only to be tried without a GPU
            self.graph = types.SimpleNamespace(replay=step)
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = self._graph_of()
        with torch.cuda.graph(self.graph):
            step()


def profile(call: Any) -> list[tuple[str, float, float]]:
    """Return name, microseconds a token and launches a token of the kernels that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    total = ("all", sum(row.device_time_total for row in rows), sum(row.count for row in rows))
    listed = [total, *((row.key[:120], row.device_time_total, row.count) for row in rows[:14])]
    return [(name, round(took / LISTED, 2), round(count / LISTED, 2)) for name, took, count in listed]


def agreement(model: Any, tokens: torch.Tensor) -> float:
    """Return how often the model chooses the same tokens when it has all of a text before it at once."""
    chosen = model(tokens).logits[:, PROMPT - 1 : -1].argmax(-1)
    return round(float((chosen == tokens[:, PROMPT:]).float().mean()), 4)


def measure(mode: str, shape: str, batch: int, device: str, repeats: int, gate: bool, ahead: bool) -> dict[str, Any]:
    """Generate in one way, in this process; `ahead` only compiles what that takes."""
    import xpuruntime.pytorch as xrt_torch
    from harness import interleaved
    from xpuruntime.measuring.statistics import paired_ratio

    model = model_of(shape, device)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    weights -= model.model.embed_tokens.weight.numel() * model.model.embed_tokens.weight.element_size()
    config = model.config
    keys = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    ids = torch.randint(1, config.vocab_size, (batch, PROMPT), device=device)
    tokens = FEW if mode in SLOW else TOKENS
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens}
    captured = anchor = None
    if mode in CAPTURED:
        captured = xrt_torch.capture_decode(model, max_length=PROMPT + TOKENS, batch=batch, **CAPTURED[mode])
        generate = captured.generate
        if mode == "loop":
            captured._recorder = None  # the same loop without graphs, as on devices that have none
    elif mode == "anchor":
        anchor = Anchor(model, batch, device)
        generate = anchor.generate
    else:
        generate = model.generate
        if mode.startswith("static"):
            options |= {"cache_implementation": "static", "disable_compile": mode == "static-eager"}
    with torch.no_grad():
        first_call = seconds(lambda: generate(ids, **options), device)
        if ahead:
            return {}
        times = [seconds(lambda: generate(ids, **options), device) for _ in range(2 if mode in SLOW else repeats)]
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        single = {**options, "max_new_tokens": 1}
        ways = {"first": lambda: generate(ids, **single)}
        if captured is not None:
            ways["plain"] = lambda: model.generate(ids, **single)
        firsts = interleaved(ways, calls=1, rounds=FIRSTS, warm=2, finish=lambda: sync(device), rotate=True)
        first = statistics.median(firsts["first"]) / 1e6
        record: dict[str, Any] = {
            "mode": mode, "shape": shape, "batch": batch, "first_call_s": round(first_call, 2),
            "token_us": round((statistics.median(times) - first) / (tokens - 1) * 1e6, 1),
            "first_token_us": round(first * 1e6),
            "top1": agreement(model, generate(ids, **options)),
            "weights": weights, "kv_bytes": batch * keys * (PROMPT + tokens // 2), "tokens": tokens,
        }  # fmt: skip
        if captured is not None:
            record["plain_first_token_us"] = round(statistics.median(firsts["plain"]))
            record["first_of_plain"] = list(paired_ratio(firsts["first"], firsts["plain"]))
            record["notes"], record["reasons"] = list(captured.report.notes), dict(captured.report.reasons)
        if gate:
            record["top1_plain"] = agreement(model, model.generate(ids, **{**options, "cache_implementation": None}))
        if device == "cuda":
            record["peak_gib"] = round(peak / 2**30, 3)
            # Of the last range, after a text for which the cache has room.
            generate(ids, **{**options, "max_new_tokens": TOKENS - STEPS - 1})
            graphs = (
                [anchor.graph] if anchor else [g.recording.graph for g in captured._graphs.values()] if captured else []
            )
            if graphs:
                record["step_us"] = bare_step(graphs[-1])
            if mode in PROFILED:
                record["kernels"] = profile(lambda: generate(ids, **{**options, "max_new_tokens": LISTED}))
    return record


def bare_step(graph: Any) -> float:
    """Return the time of a graph, replayed."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS):
        graph.replay()
    end.record()
    end.synchronize()
    return round(float(start.elapsed_time(end)) / STEPS * 1e3, 1)


def bandwidth_of(device: str) -> float:
    from gpu_timing import copy_bandwidth

    return float(copy_bandwidth()) if device == "cuda" else 20e9


def started(function: Any, *arguments: Any, method: str = "forkserver") -> Future[Any]:
    """Call a function in a process of its own, which has nothing of CUDA yet."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method))
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return future


def line(record: dict[str, Any]) -> str:
    """Return the row of a record: microseconds, times the floor, milliseconds, times plain, and GiB."""
    took, first = record.get("step_us", record["token_us"]), record.get("first_of_plain", [float("nan")])[0]
    return (
        f"{record['shape']:>4} {record['batch']:>4} {record['mode']:<10} {record['token_us']:9.1f} "
        f"{record.get('step_us', float('nan')):9.1f} {took / record['floor_us']:7.3f} "
        f"{record['first_token_us'] / 1e3:9.2f} {first:7.3f} {record.get('peak_gib', 0.0):8.3f} {record['top1']:7.4f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["1b:1", "1b:8", "1b:32", "7b:1"], help="shapes and rows")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(USUAL))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gate", action="store_true", help="also how far tokens of plain generate agree in bf16")
    parser.add_argument("--bandwidth", type=float, help="bytes a second; default: that of a copy, measured")
    parser.add_argument("--ahead", action="store_true", help="compile all ways before, side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no way after that time")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    from harness import write

    begun = time.monotonic()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # which leaves CUDA to the processes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
    multiprocessing.set_forkserver_preload([*PRELOADED])
    try:
        method, rate = "forkserver", started(bandwidth_of, options.device).result()
    except RuntimeError:
        traceback.print_exc()
        method, rate = "spawn", started(bandwidth_of, options.device, method="spawn").result()
    rate = options.bandwidth or rate
    # Way by way, so that rows of one way are timed one after the other.
    todo = [(mode, *case.split(":")) for mode, case in itertools.product(options.modes, options.cases)]
    given = (options.device, options.repeats, options.gate)
    if options.ahead:
        compiled = [(mode, shape, rows) for mode, shape, rows in todo if mode not in (*SLOW, "captured")]
        for task, future in [
            (task, started(measure, task[0], task[1], int(task[2]), *given, True, method=method)) for task in compiled
        ]:
            print(*task, "ahead:", future.exception() or "compiled", round(time.monotonic() - begun), "s", flush=True)
    records, failed = [], []
    for mode, shape, rows in todo:
        name, before = f"{shape}:{rows} {mode}", time.monotonic()
        if before - begun > options.seconds:
            failed.append(f"{name}: no time")
            continue
        try:
            record = started(measure, mode, shape, int(rows), *given, False, method=method).result()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}")
            traceback.print_exc()
            continue
        record["floor_us"] = round((record["weights"] + record["kv_bytes"]) / rate * 1e6, 1)
        record["process_s"] = round(time.monotonic() - before, 1)
        records.append(record)
        said = {name: value for name, value in record.items() if name not in ("kernels", "notes", "weights")}
        print(" ".join(f"{name}={value}" for name, value in said.items()), flush=True)
        for kernel, took, count in record.get("kernels", []):
            print(f"    {took:8.2f} us {count:7.2f} calls  {kernel}")
        for note in record.get("notes", []):
            print(f"    note: {note}", flush=True)
        body = {"bandwidth": rate, "targets": TARGETS, "compiled_ahead": options.ahead, "records": records}
        write("generation", body, options.out)
    print("model rows way         us/token   us/step /floor  first ms  /plain  peak GiB  top-1")
    for record in sorted(records, key=lambda record: (record["shape"], record["batch"])):
        print(line(record))
    print(*(f"MISSING {what}" for what in failed), f"{time.monotonic() - begun:.0f} s in all", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
