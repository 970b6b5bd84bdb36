# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The policy that a search finds, beside ONNX Runtime and OpenVINO at their defaults, on real models and two engines.

python benchmarks/bench_tune.py --budget 150

The models are those of ``tools/real_models.py --fetch``, and the demo model. The comparison comes after the search:
each round opens all three in fresh processes and times them forwards and backwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from real_model_table import MODELS, feeds
from real_models import CACHE, fetch, place

import xpuruntime as xrt
from harness import write
from xpuruntime.engines.registry import default_registry
from xpuruntime.inference.session_arguments import SessionArguments
from xpuruntime.measuring.conditions import between, moment
from xpuruntime.measuring.statistics import paired_ratio
from xpuruntime.policies import Policy
from xpuruntime.tuning.context import SearchContext, read_samples
from xpuruntime.tuning.spec.tune_spec import TuneSpec
from xpuruntime.tuning.trial import Candidate
from xpuruntime.tuning.trial_executors import ProcessExecutor

NAMES = ("silero-vad-openvino-16k", "magika", "rapidocr-cls", "rapidocr-rec", "nudenet")
DEFAULTS = {name: {"execution": {"engine": name, "device": "cpu"}} for name in ("onnxruntime", "openvino")}
CONFIDENCE = 0.99
#: What the search is given: the device alone, so that all engines are open to it.
CONTROL = {"execution": {"device": "cpu"}}
SAMPLES = 8


def inputs_of(name: str) -> tuple[Path, Any]:
    """Return the file of a model and its inputs."""
    if name == "demo":
        return Path(xrt.demo_model_path()), {"image": xrt.demo_images()[0][:SAMPLES]}
    model = next(one for one in MODELS if one.name == name)
    return place(CACHE, model), list(feeds(model, SAMPLES))


def compared(path: Path, given: Any, policies: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Return seconds a run of policies, the mean of two turns of a fresh process in every round."""
    spec = TuneSpec()
    context = SearchContext(path, SessionArguments(policy=CONTROL), spec, default_registry(), None, None)
    samples = read_samples(given, context.request.model, batch=1, seed=0)
    candidates = [
        Candidate(id=name, engine="", device="cpu", changes={}, policy=Policy.coerce(policy).to_dict())
        for name, policy in policies.items()
    ]
    found: dict[str, list[float]] = {name: [] for name in policies}
    with tempfile.TemporaryDirectory() as folder:
        count = context.write_samples(samples.feeds, Path(folder))
        executor = ProcessExecutor(
            lambda one: context.job(one, {1: (folder, count)}), spec.constraints, context.devices[0]
        )
        for number in range(rounds):
            order = candidates[number % len(candidates) :] + candidates[: number % len(candidates)]
            figures = executor.measure_fresh(order)
            for one, first, last in zip(order, figures, reversed(figures), strict=False):
                found[one.id].append((first * last) ** 0.5)
    return found


def row(name: str, budget: float, rounds: int) -> dict[str, Any]:
    """Search a policy for one model, and compare it with the defaults."""
    path, given = inputs_of(name)
    result = xrt.tune(path, CONTROL, inputs=given, budget=budget)
    print(f"{name}: {result.headline} ({result.elapsed:.0f} s): {result.changes}", flush=True)
    tuned = result.policy if result.verdict in ("winner", "tied") else CONTROL
    before = moment()
    times = compared(path, given, {**DEFAULTS, "tuned": tuned}, rounds)
    remarks = between(before, moment()).remarks()
    ratios = {}
    for other in DEFAULTS:
        ratio = paired_ratio(times["tuned"], times[other], confidence=CONFIDENCE)
        ratios[other] = list(ratio)
        print(f"  tuned to {other}: {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", flush=True)
    return {
        "verdict": result.verdict,
        "headline": result.headline,
        "gain": None if result.gain is None else [result.gain.value, result.gain.low, result.gain.high],
        "changes": result.changes,
        "stages": result.stages,
        "seconds": result.elapsed,
        "budget": budget,
        "notes": list(result.notes),
        "samples_us": {case: [seconds * 1e6 for seconds in values] for case, values in times.items()},
        "ratios": ratios,
        "remarks": remarks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of each search")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of fresh processes of the comparison")
    parser.add_argument("--models", default=",".join(("demo", *NAMES)))
    parser.add_argument("--out")
    options = parser.parse_args()
    names = options.models.split(",")
    fetch(CACHE, tuple(model for model in MODELS if model.name in names))
    rows = {name: row(name, options.budget, options.rounds) for name in names}
    body = {"rounds": options.rounds, "confidence": CONFIDENCE, "models": rows}
    write("tune_cpu", body, options.out)


if __name__ == "__main__":
    main()
