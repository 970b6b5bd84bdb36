# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies that a search of bound runs finds on CUDA, beside those by hand and `torch.compile`.

    python benchmarks/bench_tune_gpu.py --budget 150 --cases "resnet50, batch 1;encoder, batch 8"

The search is given the engine and the device, random inputs, and the accuracy that is allowed. What it found and what
is tuned by hand then run on the same inputs on the device, in interleaved rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # its CUDA libraries are those that ONNX Runtime finds

import xpuruntime as xrt
from harness import interleaved, write
from tune_cases import CASES, Case
from xpuruntime.measuring.statistics import paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

ACCURACY = {"rtol": 0.05, "atol": 0.05, "cosine": 0.999}
TUNED = "tuned"
CONFIDENCE = 0.99


def searched(case: Case, path: Path, control: dict[str, Any], given: Any, budget: float) -> xrt.TuneResult:
    """Search a policy for bound runs."""
    objective = {"minimise": "latency.p50", "call": "bind", **({"batch": case.batch} if case.batch else {})}
    spec = {"schema": "xpuruntime.tune/1", "objective": objective, "constraints": {"accuracy": ACCURACY}}
    return xrt.tune(path, control, spec=spec, inputs=given, budget=budget)


def timed(
    case: Case, path: Path, policies: dict[str, Any], inputs: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return microseconds of runs, one mean for each round, and why some policies cannot run."""
    given = {name: torch.from_numpy(value).to(options.device) for name, value in inputs.items()}
    cases: dict[str, Callable[[], Any]] = case.callables(path, given) if case.callables else {}
    refused: dict[str, str] = {}
    with ExitStack() as opened:
        for name, policy in policies.items():
            try:
                session = opened.enter_context(xrt.InferenceSession(path, policy=policy))
                cases[name] = opened.enter_context(closing(session.bind(given))).run
            except xrt.XpuRuntimeError as error:
                refused[name] = str(error)
                print(f"  {name}: refused: {refused[name][:200]}", flush=True)
        finish = torch.cuda.synchronize if options.device.startswith("cuda") else None
        times = interleaved(cases, calls=options.calls, rounds=options.rounds, finish=finish, rotate=True)
    return times, refused


def row(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Search, then compare with what is tuned by hand."""
    case = CASES[name]()
    path = folder / f"{name.split(',')[0].split('.')[0].replace(' ', '_')}{case.suffix}"
    case.make(path)
    given, inputs = case.samples()
    execution = {"engine": case.engine, "device": options.device, **case.fixed}
    result = searched(case, path, {"execution": execution}, given, options.budget)
    print(f"{name}: {result.headline} ({result.elapsed:.0f} s): {result.changes}", flush=True)
    for candidate in result.candidates:
        print(f"  {candidate.code:12} {candidate.figure!s:.24} {candidate.changes} {candidate.reason[:90]}", flush=True)
    policies = {
        label: {**policy, "execution": {**execution, **policy.get("execution", {})}}
        for label, policy in case.policies.items()
    }
    policies[TUNED] = result.policy if result.verdict in ("winner", "tied") else {"execution": execution}
    times, refused = timed(case, path, policies, inputs, options)
    by_hand = [label for label in times if label != TUNED]
    ratios = {label: list(paired_ratio(times[TUNED], times[label], confidence=CONFIDENCE)) for label in by_hand}
    for label, (ratio, low, high) in ratios.items():
        print(f"  tuned to {label}: {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {
        "verdict": result.verdict, "headline": result.headline, "changes": result.changes, "stages": result.stages,
        "seconds": result.elapsed, "budget": options.budget, "notes": list(result.notes), "samples_us": times,
        "ratios": ratios, "refused": refused,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"separated by ';', of: {'; '.join(CASES)}; default: all")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of each search")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases.split(";") if options.cases else CASES:
            rows[name] = row(name, Path(folder), options)
            body = {"rounds": options.rounds, "confidence": CONFIDENCE, "accuracy": ACCURACY, "models": rows}
            write("tune_cuda", body, options.out)


if __name__ == "__main__":
    main()
