# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How often a speed claim of ``xrt verify`` finds a session that was made slower by a known share.

python benchmarks/bench_verify.py --seconds 900
python benchmarks/bench_verify.py --planted 0,0.1 --trials 20 --budget 5

A session and its control run the same model in a worker process each. In the session's worker every run is followed by
a busy wait of a share of its own time, so that the slowdown is known; then the claim is decided as verify does.
Clocks and the loop add a little to the wait, so that a planted share is a lower bound.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from harness import write
from xpuruntime.locks.session_worker import MODULE, session_worker
from xpuruntime.locks.verification.sections.speed import decide
from xpuruntime.locks.verification.timing import Finding
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import in_worker, measure
from xpuruntime.measuring.statistics import Margin, Verdict
from xpuruntime.policies import VerifySpeed
from xpuruntime.testing import models

#: Rounds of `latency.p50`, the fewest and the most, as verify has them.
ROUNDS = (9, 121)


def trial(
    workers: tuple[Any, Any], planted: float, checks: VerifySpeed
) -> tuple[str, str, int, list[tuple[float, ...]]]:
    """Return verdict and code of a claim, its rounds, and their log-ratios of the session and of the control's twin."""
    control, session = workers
    found = measure(
        {
            "control": in_worker(control, f"{MODULE}:time_session"),
            "session": in_worker(session, "slowed_session:time_slowed", share=planted),
        },
        control="control",
        margin=Margin(checks.max_slowdown, 2e-6),
        confidence=checks.confidence,
        rounds=ROUNDS,
        budget=checks.budget,
        settled=lambda found: all(one.within_limit or one.verdict is Verdict.SLOWER for one in found.values()),
    )
    one = found.comparisons["session"]
    (claim,) = decide([Finding("latency.p50", one, {}, (), ended=found.ended)], checks, "the control")
    times = zip(found.rounds["session"], found.rounds["control"], found.twin, strict=True)
    return claim.verdict, claim.code, one.rounds, [tuple(float(value) for value in row) for row in times]


def main() -> None:
    """Run trials of every planted share in turn until time or trials are used up, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", default="0,0.05,0.1", help="shares, with commas")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--trials", type=int, default=300, help="of every share, at most")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of one claim")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--out", help="folder for JSON")
    options = parser.parse_args()
    shares = [float(one) for one in options.planted.split(",")]
    checks = VerifySpeed(max_slowdown=0.05, budget=options.budget)
    counts: dict[float, Counter[str]] = {share: Counter() for share in shares}
    rounds: dict[float, list[int]] = {share: [] for share in shares}
    unchanged: list[list[tuple[float, ...]]] = []
    ends = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = models.save(models.mlp(options.width, batch=16), folder)
        feeds = {"x": np.random.default_rng(0).standard_normal((16, options.width), np.float32)}
        write_arrays(folder / "inputs", feeds)
        policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "threads": 1}}
        here = Path(__file__).parent
        with session_worker(sys.executable, here) as control, session_worker(sys.executable, here) as session:
            for worker in (control, session):
                worker.call(
                    f"{MODULE}:open_session", model=str(model), inputs=str(folder / "inputs"),
                    arguments={"policy": policy},
                )  # fmt: skip
            while time.monotonic() < ends and any(len(rounds[one]) < options.trials for one in shares):
                for share in shares:
                    verdict, code, number, times = trial((control, session), share, checks)
                    counts[share][verdict if code != "noisy" else "inconclusive, too noisy"] += 1
                    rounds[share].append(number)
                    if share == 0:
                        unchanged.append(times)
    words = ("pass", "fail", "inconclusive", "inconclusive, too noisy")
    print("| planted | claims | " + " | ".join(words) + " | median of the rounds |")
    print("|---|---|" + "---|" * (len(words) + 1))
    rows = []
    for share in shares:
        cells = [f"{share:.0%}", str(len(rounds[share])), *(str(counts[share][word]) for word in words)]
        print("| " + " | ".join((*cells, f"{float(np.median(rounds[share])):.0f}")) + " |")
        rows.append({"planted": share, "claims": len(rounds[share]), **counts[share]})
    if unchanged:
        once = float(np.median([row[1] for one in unchanged for row in one]))
        spread = [math.log(row[0] / row[1]) for one in unchanged for row in one]
        print(f"one run: {once * 1e6:,.0f} us; quartiles of the log-ratios of unchanged rounds: "
              f"{np.percentile(spread, 25):+.3f} {np.percentile(spread, 75):+.3f}")  # fmt: skip
    if options.out is not None:
        write("verify_power", {"rows": rows, "checks": checks.to_dict()}, options.out)


if __name__ == "__main__":
    main()
