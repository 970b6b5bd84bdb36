# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tokens of random Llama-shaped models by plain ``generate`` and by captured steps, each way in a process of its own.

python benchmarks/bench_generation.py --cases 1b:1 1b:8 1b:32 7b:1

``token`` is ``generate`` end to end without the first token, ``step`` the replay of one graph, and ``floor`` the time
in which the weights are read at the rate of a copy. ``top1`` is how often the plain model, given the same text, chooses
the same token: tokens of bf16 need not be equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

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
#: Replays of one graph that are timed, and first tokens.
STEPS, FIRSTS = 100, 25
#: Options of `capture_decode`; others are no captures of ours.
CAPTURED: dict[str, dict[str, Any]] = {
    "captured": {"fuse": False, "compile": False},
    "compiled": {"fuse": False},
    "joined": {"tolerance": 0.0},
    "fused-eager-choice": {"compile": False},
    "fused": {},
}
MODES = ("plain", "static-eager", "static", "anchor", *CAPTURED)
#: On an NVIDIA H200: microseconds a step of one row, a step of more rows over that of one, a step over reading weights
#: and cache, and the first token over that of plain ``generate``.
TARGETS = {"step_us": {"1b": 650.0}, "of_one_row": {"8": 1.15, "32": 1.4}, "of_floor": {"7b": 1.333}, "first": 1.02}


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

    def __init__(self, model: Any, batch: int) -> None:
        import transformers

        self._model = model
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + TOKENS)
        self._token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
        self._position = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
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
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
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
    return [(name, round(took / TOKENS, 2), round(count / TOKENS, 2)) for name, took, count in listed]


def agreement(model: Any, tokens: torch.Tensor) -> float:
    """Return how often the model chooses the same tokens when it has all of a text before it at once."""
    chosen = model(tokens).logits[:, PROMPT - 1 : -1].argmax(-1)
    return round(float((chosen == tokens[:, PROMPT:]).float().mean()), 4)


def measure(mode: str, shape: str, batch: int, device: str, repeats: int, gate: bool) -> dict[str, Any]:
    """Generate in one way, in this process."""
    import xpuruntime.pytorch as xrt_torch
    from harness import interleaved
    from xpuruntime.measuring.statistics import paired_ratio

    model = model_of(shape, device)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    weights -= model.model.embed_tokens.weight.numel() * model.model.embed_tokens.weight.element_size()
    config = model.config
    keys = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    ids = torch.randint(1, config.vocab_size, (batch, PROMPT), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": TOKENS}
    captured = generate = None
    if mode in CAPTURED:
        captured = xrt_torch.capture_decode(model, max_length=PROMPT + TOKENS, batch=batch, **CAPTURED[mode])
        generate = captured.generate
    elif mode == "anchor":
        generate = Anchor(model, batch).generate
    else:
        generate = model.generate
        if mode.startswith("static"):
            options |= {"cache_implementation": "static", "disable_compile": mode == "static-eager"}
    with torch.no_grad():
        first_call = seconds(lambda: generate(ids, **options), device)
        tokens = generate(ids, **options)
        times = [seconds(lambda: generate(ids, **options), device) for _ in range(repeats)]
        single = {**options, "max_new_tokens": 1}
        ways = {"first": lambda: generate(ids, **single)}
        if captured is not None:
            ways["plain"] = lambda: model.generate(ids, **single)
        firsts = interleaved(ways, calls=1, rounds=FIRSTS, warm=2, finish=lambda: sync(device), rotate=True)
        first = statistics.median(firsts["first"]) / 1e6
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        top1 = agreement(model, tokens)
        record: dict[str, Any] = {
            "mode": mode, "shape": shape, "batch": batch, "first_call_s": round(first_call, 2),
            "token_us": round((statistics.median(times) - first) / (TOKENS - 1) * 1e6, 1),
            "first_token_us": round(first * 1e6),
            "top1": top1,
            "weights": weights, "kv_bytes": batch * keys * (PROMPT + TOKENS // 2),
        }  # fmt: skip
        if captured is not None:
            record["plain_first_token_us"] = round(statistics.median(firsts["plain"]))
            record["first_of_plain"] = list(paired_ratio(firsts["first"], firsts["plain"]))
            record["notes"], record["reasons"] = list(captured.report.notes), dict(captured.report.reasons)
        if gate:
            record["top1_plain"] = agreement(model, model.generate(ids, **{**options, "cache_implementation": None}))
        if device == "cuda":
            record["peak_gib"] = round(peak / 2**30, 3)
            if captured is not None:
                record["step_us"] = bare_step(
                    captured, lambda: generate(ids, **{**options, "max_new_tokens": TOKENS - STEPS - 1})
                )
            if mode != "plain":
                record["kernels"] = profile(lambda: generate(ids, **options))
    return record


def bare_step(captured: Any, call: Any) -> float:
    """Return the time of the graph of the last range, replayed after a text for which the cache has room."""
    call()
    graph = list(captured._graphs.values())[-1].recording.graph
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS):
        graph.replay()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) / STEPS * 1e3, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["1b:1", "1b:8", "1b:32", "7b:1"], help="shapes and rows")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gate", action="store_true", help="also how far tokens of plain generate agree in bf16")
    parser.add_argument("--bandwidth", type=float, help="bytes a second; default: that of a copy, measured")
    parser.add_argument("--here", action="store_true", help="measure in this process, the first of each list")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    if options.here:
        shape, rows = options.cases[0].split(":")
        record = measure(options.modes[0], shape, int(rows), options.device, options.repeats, options.gate)
        print(json.dumps(record))
        return 0
    from gpu_timing import copy_bandwidth
    from harness import write

    rate = options.bandwidth or (copy_bandwidth() if options.device == "cuda" else 20e9)
    records, failed = [], []
    for case, mode in itertools.product(options.cases, options.modes):
        arguments = ["--here", "--cases", case, "--modes", mode]
        arguments += ["--device", options.device, "--repeats", str(options.repeats)]
        arguments += ["--gate"] if options.gate else []
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            failed.append(f"{case} {mode}")
            print(f"FAILED: {failed[-1]}\n{done.stderr[-2000:]}", flush=True)
            continue
        record = json.loads(done.stdout.strip().splitlines()[-1])
        record["floor_us"] = round((record["weights"] + record["kv_bytes"]) / rate * 1e6, 1)
        records.append(record)
        said = {name: value for name, value in record.items() if name not in ("kernels", "notes", "weights")}
        print(" ".join(f"{name}={value}" for name, value in said.items()), flush=True)
        for name, took, count in record.get("kernels", []):
            print(f"    {took:8.2f} us {count:7.2f} calls  {name}")
        for note in record.get("notes", []):
            print(f"    note: {note}", flush=True)
        write("generation", {"bandwidth": rate, "targets": TARGETS, "records": records}, options.out)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
