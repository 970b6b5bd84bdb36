# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Error rates of ``xrt verify``: failures of an unchanged model, and models slower by a known share that are found.

python benchmarks/bench_verify.py --verifies 300 --trials 300
python benchmarks/bench_verify.py --verifies 300 --trials 300 --resume
python benchmarks/bench_verify.py --verifies 0 --planted 0.05,0.1 --trials 20

*Verifications* are whole ones of the shipped model: nothing changed, so none of their claims may fail. *Trials* are
claims of speed: a session and its control run the same model in a worker process each, and in the session's worker
every run is followed by a busy wait of a share of its own time, so that the slowdown is known. Clocks and the loop add
a little to the wait, so that a planted share is a lower bound.

Each result goes into a journal as soon as it is known; after a cut, ``--resume`` goes on there. The JSON is written
when all is done or ``--seconds`` are over.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import xpuruntime as xrt
from harness import environment, write
from xpuruntime.errors import InputError
from xpuruntime.files.journal import Journal
from xpuruntime.locks.environments import MODULE, session_worker
from xpuruntime.locks.verification.speed import decide, time_metric
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import in_worker
from xpuruntime.policies import VerifySpeed
from xpuruntime.testing import models

#: Sections of a verification that an unchanged model goes through.
SECTIONS = ("evidence", "accuracy", "memory", "audit", "speed")
#: At most so many of the unchanged may fail, and of those 10 % slower may not be found.
TARGETS = {"false failures": 0.01, "10 % not found": 0.01}


class Results:
    """What was measured so far, in a file.

    Parameters
    ----------
    path : Path
    of : dict
        What it is of; one that is resumed must be of the same.
    resume : bool
    """

    def __init__(self, path: Path, of: dict[str, Any], *, resume: bool) -> None:
        try:
            self._journal = Journal(path, "bench_verify/2", of, resume=resume)
        except InputError as error:
            sys.exit(f"error: {error}")
        self.entries: list[dict[str, Any]] = []
        while self._journal.has(str(len(self.entries))):
            self.entries.append(self._journal.recall(str(len(self.entries))))

    def add(self, entry: dict[str, Any]) -> None:
        """Keep a result before anything else happens."""
        self._journal.record(str(len(self.entries)), entry, 0.0)
        self.entries.append(entry)

    def close(self) -> None:
        """Let others go on with the file."""
        self._journal.close()

    def count(self, kind: str, planted: float | None = None) -> int:
        """Return how many there are."""
        return sum(entry["kind"] == kind and entry.get("planted") == planted for entry in self.entries)


def verify_once(budget: float) -> dict[str, Any]:
    """Verify the shipped model, and return the verdicts of its claims."""
    speed = {"max_slowdown": "5%", "budget": f"{budget:g}s"}
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "verify": {"speed": speed}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
        found = xrt.verify(xrt.demo_model_path(), policy, only=SECTIONS)
    claims = [[claim.section, claim.verdict, claim.code] for claim in found.claims]
    return {"claims": claims, "failed": [f"{one.id}: {one.reason}" for one in found.of("fail")]}


class Slowed:
    """A session and its control in worker processes, of which the session can be slowed."""

    def __init__(self, stack: ExitStack, checks: VerifySpeed, width: int) -> None:
        self._checks = checks
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = models.save(models.mlp(width, batch=16), folder)
        write_arrays(folder / "inputs", {"x": np.random.default_rng(0).standard_normal((16, width)).astype(np.float32)})
        policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "threads": 1}}
        here = Path(__file__).resolve().parent
        self._workers = [stack.enter_context(session_worker(sys.executable, here)) for _ in range(2)]
        for worker in self._workers:
            arguments = {"model": str(model), "inputs": str(folder / "inputs"), "arguments": {"policy": policy}}
            worker.call(f"{MODULE}:open_session", **arguments)

    def trial(self, planted: float) -> dict[str, Any]:
        """Time both, and return the claim as verify decides it."""
        session = in_worker(self._workers[1], "slowed_session:time_slowed", share=planted)
        control = in_worker(self._workers[0], f"{MODULE}:time_session")
        found = time_metric("latency.p50", session, control, self._checks, self._checks.budget)
        (claim,) = decide([found], self._checks, "the control")
        figures = {name: claim.figures[name] for name in ("ratio", "low", "high", "rounds", "control_us")}
        return {"verdict": claim.verdict, "code": claim.code, **figures}


def summary(results: Results, shares: list[float]) -> dict[str, Any]:
    """Return counts of verdicts by section and by planted share."""
    sections: dict[str, Counter[str]] = defaultdict(Counter)
    planted: list[dict[str, Any]] = []
    failed: list[str] = []
    for entry in results.entries:
        if entry["kind"] == "verify":
            for section, verdict, code in entry["claims"]:
                sections[section][_word(verdict, code)] += 1
            failed += entry["failed"]
    for share in shares:
        found = [entry for entry in results.entries if entry["kind"] == "trial" and entry["planted"] == share]
        counts = Counter(_word(one["verdict"], one["code"]) for one in found)
        if found:
            rounds = float(np.median([one["rounds"] for one in found]))
            ratio = float(np.median([one["ratio"] for one in found]))
            planted.append({"planted": share, "claims": len(found), "verdicts": counts, "rounds": rounds,
                            "ratio": ratio})  # fmt: skip
    whole = results.count("verify")
    with_failure = sum(bool(entry["failed"]) for entry in results.entries if entry["kind"] == "verify")
    loads = sorted(entry["load"] for entry in results.entries)
    return {
        "verifications": whole, "with_failure": with_failure, "failed": failed, "sections": sections,
        "planted": planted, "load": [loads[0], float(np.median(loads)), loads[-1]] if loads else [],
        "seconds": sum(entry["seconds"] for entry in results.entries),
    }  # fmt: skip


def _word(verdict: str, code: str) -> str:
    return "too noisy" if code == "noisy" else verdict


def main() -> None:
    """Run what is missing in turn until it is there or the time is over, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifies", type=int, default=300, help="verifications of the unchanged model")
    parser.add_argument("--planted", default="0,0.05,0.1", help="shares, with commas")
    parser.add_argument("--trials", type=int, default=300, help="of every share")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are begun")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of one claim")
    parser.add_argument("--verify-budget", type=float, default=5.0, help="seconds of the speed claim of a verification")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--journal", type=Path, default=Path("verify_power.jsonl"))
    parser.add_argument("--resume", action="store_true", help="go on with the journal")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    shares = [float(one) for one in options.planted.split(",")]
    checks = VerifySpeed(max_slowdown=0.05, budget=options.budget)
    about = environment()
    of = {"packages": about["packages"], "processor": about.get("processor"), "budget": options.budget,
          "verify_budget": options.verify_budget, "width": options.width}  # fmt: skip
    results = Results(options.journal, of, resume=options.resume)
    wanted = [("verify", None, options.verifies), *(("trial", share, options.trials) for share in shares)]
    ends = time.monotonic() + options.seconds
    with ExitStack() as stack:
        slowed = Slowed(stack, checks, options.width) if options.trials else None
        while missing := [one for one in wanted if results.count(*one[:2]) < one[2]]:
            for kind, share, _ in missing:
                if time.monotonic() >= ends:
                    break
                began = time.monotonic()
                if kind == "verify":
                    entry = {"kind": kind, **verify_once(options.verify_budget)}
                else:
                    assert slowed is not None
                    assert share is not None
                    entry = {"kind": kind, "planted": share, **slowed.trial(share)}
                results.add({**entry, "load": os.getloadavg()[0], "seconds": time.monotonic() - began})
            if time.monotonic() >= ends:
                print(f"note: the time is over; go on with --journal {options.journal} --resume", file=sys.stderr)
                break
    found = summary(results, shares)
    body = {**found, "targets": TARGETS, "checks": checks.to_plain(), "verify_budget": options.verify_budget,
            "wanted": {"verifies": options.verifies, "trials": options.trials}}  # fmt: skip
    write("verify_power", body, options.out)
    for section, counts in found["sections"].items():
        print(f"{section:12} {dict(counts)}")
    for row in found["planted"]:
        print(f"{row['planted']:5.0%} slower: {row['claims']} claims, {dict(row['verdicts'])}, "
              f"median of {row['rounds']:.0f} rounds, {row['ratio']:.3f} times")  # fmt: skip
    for one in found["failed"]:
        print(f"FAILED {one}")


if __name__ == "__main__":
    main()
