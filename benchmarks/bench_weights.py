# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decode steps with quantized weights: what is stored and computed, time against the floor of bf16, and gates.

python benchmarks/bench_weights.py
python benchmarks/bench_weights.py --modes int8/float --device cpu --quick --out folder

Each mode prepares in a process of its own, all at once, for at most `--limit` seconds, and is timed alone. The model is
a random decoder of Llama's shape in bf16. Gates compare it, as it is, with the captured step that is timed, on random
texts. Random weights are more sensitive than trained ones: only a KL divergence that a broken product has is a failure
here. Times of layers are those of the device's work inside of them, eagerly; a step is the replay of a captured step
that torch.compile has compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch
from xpuruntime.generation import check_gates

if TYPE_CHECKING:
    from collections.abc import Callable

#: Replays that are timed.
STEPS = 200
PLAIN = "bf16"
MODES = ("fp8/fp8", "int8/int8", "int4/float", "int8/float", "fp8/float")
#: Seconds in which a mode that is ready has to be timed.
_TIMED = 40
_BEGUN = time.monotonic()


def decoder(device: str, *, quick: bool) -> Any:
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # an incomplete one ends the import
    import transformers

    torch.manual_seed(0)
    width, layers = (64, 2) if quick else (4096, 4)
    config = transformers.LlamaConfig(
        vocab_size=512 if quick else 32000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32 if quick else 32, num_key_value_heads=2 if quick else 8,
        max_position_embeddings=256, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def measure(mode: str, device: str, go: Callable[[], Any], *, quick: bool) -> dict[str, Any]:
    """Prepare a mode, and time it after `go` has returned."""
    stages: dict[str, float] = {}

    def reached(stage: str) -> None:
        stages[stage] = round(time.monotonic() - _BEGUN, 1)
        print(f"  {mode}: {stage} after {stages[stage]} s", file=sys.stderr, flush=True)

    plain = decoder(device, quick=quick)
    reached("model")
    row: dict[str, Any] = {"mode": mode, "device": device, "stages_s": stages}
    policy, model = None, plain
    if mode != PLAIN:
        storage, _, compute = mode.partition("/")
        weights = {"storage": storage, "compute": compute, "exclude": ["lm_head"]}
        policy = xrt.Policy(mode="strict", execution={"weights": weights})
        model = xrt_torch.quantize(copy.deepcopy(plain), policy)
        reached("quantized")
    draw = torch.Generator().manual_seed(1)
    texts = torch.randint(1, plain.config.vocab_size, (2, 24), generator=draw).tolist()
    captured = xrt_torch.capture_decode(model, max_length=256, kv_ranges=[256], fuse=False)
    ours = xrt_torch.logprobs_of(model, generate=captured.generate)
    ours.logprobs(texts[0])
    reached("captured")
    gates = check_gates(xrt_torch.logprobs_of(plain), ours, {"kl": 1.0, "top1": 0.0}, texts=texts)
    row["gates"] = {gate.name: [gate.verdict, gate.observed, gate.figures] for gate in gates.gates}
    row["reasons"] = dict(captured.report.reasons)
    reached("judged")
    go()
    if captured._graphs:
        ours.logprobs(texts[0])  # the cache has room for all replays after it
        row |= _replayed(next(iter(captured._graphs.values())).recording.graph)
    captured.reset()
    if policy is not None:
        ids = torch.ones(1, 1, dtype=torch.long, device=device)
        row |= _evidence(model, policy, ids, calls=2 if quick else 5)
    return row


def _replayed(graph: Any) -> dict[str, Any]:
    """Return the median microseconds of a replay, and of the kernels that take most of it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    taken = [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)[:4]
    longest = {kernel.key[:120]: [kernel.count, round(kernel.self_device_time_total, 1)] for kernel in kernels}
    return {"step_us": round(statistics.median(taken), 1), "kernels": longest}


def _evidence(model: Any, policy: Any, ids: Any, *, calls: int) -> dict[str, Any]:
    with torch.no_grad(), xrt_torch.kernel_policy(policy, root=model):
        cache = model(ids, use_cache=True).past_key_values
        model(ids, past_key_values=cache, use_cache=True)
        with xrt_torch.explain(root=model) as found:
            for _ in range(calls):
                model(ids, past_key_values=cache, use_cache=True)
    counted = [weight for weight in found.weights if weight.module != "lm_head"]
    return {
        "storage": sorted({weight.storage for weight in counted}),
        "compute": sorted({weight.compute for weight in counted}),
        "operators": sorted({name for weight in counted for name in weight.operators}),
        "deviations": found.weight_deviations,
        "traffic": found.weight_traffic.verdict if found.weight_traffic else "none",
        "layers_us": found.weight_traffic.layers_us if found.weight_traffic else 0.0,
        "floor_us": found.weight_traffic.floor_us if found.weight_traffic else 0.0,
        "reason": found.weight_traffic.reason if found.weight_traffic else "",
    }


def _prepared(mode: str, device: str, limit: float, *, quick: bool) -> None:
    """Measure a mode in this process, when a line comes; a stage that does not end shows its stack."""

    def go() -> None:
        faulthandler.cancel_dump_traceback_later()
        print("READY", flush=True)
        sys.stdin.readline()
        faulthandler.dump_traceback_later(_TIMED, exit=True)

    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        row = measure(mode, device, go, quick=quick)
    except Exception as error:
        row = {"mode": mode, "device": device, "refused": str(error)}
    print(json.dumps(row), flush=True)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=(PLAIN, *MODES), default=[PLAIN, *MODES])
    parser.add_argument("--here", action="store_true", help="measure the first mode in this process")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=float, default=600, help="seconds in which a mode has to be prepared")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    stated = parser.parse_args()
    warnings.simplefilter("ignore")
    if stated.here:
        _prepared(stated.modes[0], stated.device, stated.limit, quick=stated.quick)
        return
    from harness import write

    options = ["--device", stated.device, "--limit", str(stated.limit), *(["--quick"] if stated.quick else [])]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--here", "--modes", mode, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for mode in stated.modes
    ]  # fmt: skip
    said = [_until_ready(process) for process in started]
    rows = []
    for mode, process, line in zip(stated.modes, started, said, strict=True):
        if line == "READY":
            with contextlib.suppress(BrokenPipeError):
                line = process.communicate("go\n")[0].strip().rpartition("\n")[2]
        ended = {"mode": mode, "refused": f"not prepared in {stated.limit:g} s, or not timed in {_TIMED} s"}
        row = json.loads(line) if line.startswith("{") else ended
        rows.append(row)
        write("weights_cuda", {"rows": rows}, stated.out)
        told = [f"{name} {verdict} {observed}" for name, (verdict, observed, _) in row.get("gates", {}).items()]
        names = ("step_us", "refused", "traffic", "reason", "storage", "compute", "operators", "reasons", "kernels")
        print(mode, *(f"{name} {row[name]}" for name in names if row.get(name)), *told, sep=" | ", flush=True)


def _until_ready(process: Any) -> str:
    """Return the line by which a process is ready, or its result where it is not going to be."""
    line = ""
    for line in process.stdout:
        if line.strip() == "READY" or line.startswith("{"):
            break
    return line.strip()


if __name__ == "__main__":
    main()
