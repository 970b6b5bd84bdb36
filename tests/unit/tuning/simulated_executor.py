# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Executor whose candidates take simulated time, with noise of turns and of processes, and a clock that follows."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xpuruntime.files.journal import Journal
from xpuruntime.policies import Policy
from xpuruntime.tuning.space import Planned, Rejected, Space
from xpuruntime.tuning.spec.tune_spec import TuneSpec
from xpuruntime.tuning.trial import Candidate, CandidateFailed, Measurements, OutOfTime, Trial, TrialDevice
from xpuruntime.tuning.trial_executors import Executor
from xpuruntime.tuning.tune_result import TuneProgress
from xpuruntime.tuning.tune_search import Outcome, Search

Seconds = Callable[[Mapping[str, Any]], float]
TURN, OPEN = 0.02, 1.0


class SimulatedExecutor(Executor):
    """Candidates take ``seconds(changes)`` a run and ``opens(changes)`` to open; `fails` gives what comes in place."""

    def __init__(
        self,
        seconds: Seconds,
        *,
        seed: int = 0,
        turns: float = 0.03,
        processes: float = 0.01,
        fails: Callable[[Candidate], Trial | CandidateFailed | None] = lambda one: None,
        device: str = "cpu",
        opens: Seconds = lambda changes: OPEN,
    ) -> None:
        self.device = TrialDevice(name=device, device="cpu")
        self.seconds, self.fails, self.seed = seconds, fails, seed
        self.turns, self.processes, self.opens = turns, processes, opens
        self.now = 0.0
        self.measured: list[str] = []
        self._process: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def clock(self) -> float:
        return self.now

    def calibrate(self, run: float | None) -> None:
        pass

    def trial(self, candidate: Candidate) -> Trial:
        took = self.opens(candidate.changes)
        self._spend(took)
        self.measured.append(f"trial {candidate.id}")
        found = self.fails(candidate)
        return (
            found if isinstance(found, Trial) else Trial(start=0.1, memory=1 << 26, error=0.0, cosine=1.0, seconds=took)
        )

    def turn(self, candidate: Candidate) -> float:
        self._spend(TURN)
        self.measured.append(f"turn {candidate.id}")
        if isinstance(failed := self.fails(candidate), CandidateFailed):
            raise failed
        process = self._process.setdefault(candidate.id, self._noise(f"process {candidate.id}", self.processes))
        return self.seconds(candidate.changes) * process * self._noise(f"turn {candidate.id}", self.turns)

    def count_slow_runs(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        p99 = 1.5 * self.seconds(candidate.changes)
        return {"runs": runs, "over": 0 if p99 <= limit else runs // 10, "p99": p99, "wrong": ""}

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        bad = candidate.changes.get("execution.threads") == 2
        return {"reached": not bad, "reason": f"{grade}: planted" if bad else ""}

    def op_time_shares(self, candidate: Candidate) -> dict[str, float]:
        return {"MatMul": 0.9, "Softmax": 0.1}

    def measure_fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        self._spend(max(self.opens(candidate.changes) for candidate in candidates) * len(candidates))
        self.measured.append(f"duel {candidates[-1].id}")
        process = {candidate.id: self._noise(f"fresh {candidate.id}", self.processes) for candidate in candidates}
        return [
            self.seconds(candidate.changes) * process[candidate.id] * self._noise(f"duel {candidate.id}", self.turns)
            for candidate in (*candidates, *reversed(candidates))
        ]

    def close(self, candidate: Candidate | None = None) -> None:
        if candidate is not None:
            self._process.pop(candidate.id, None)

    def _spend(self, seconds: float) -> None:
        """Let time go by, until the budget ends."""
        left = max(self.time_left(), 0.0)
        self.now += min(seconds, left)
        if seconds > left:
            raise OutOfTime

    def _noise(self, what: str, spread: float) -> float:
        """Return lognormal noise that follows from the seed, what it is of, and how often that was asked."""
        self._counts[what] = count = self._counts.get(what, 0) + 1
        digest = hashlib.sha256(f"{self.seed} {what} {count}".encode()).digest()
        return math.exp(random.Random(digest).gauss(0.0, spread))


def planner(changes: Mapping[str, Any]) -> Planned | Rejected:
    """Take all changes but an engine called ``missing`` and kernels called ``no``."""
    if changes.get("execution.engine") == "missing":
        return Rejected("engine_missing: it is not installed")
    if "no" in (value for key, value in changes.items() if key.startswith("kernels.")):
        return Rejected("there is no such kernel")
    gets = {key: value for key, value in changes.items() if key != "execution.device"}
    if gets == {"execution.engine": "a"}:
        gets = {}
    return Planned(str(changes.get("execution.engine", "a")), "cpu", Policy(), repr(sorted(gets.items())), None)


def run(
    executor: SimulatedExecutor | Sequence[SimulatedExecutor],
    space: Space,
    spec: TuneSpec | None = None,
    journal: Journal | None = None,
    progress: Callable[[TuneProgress], None] | None = None,
    cancel: Callable[[], bool] | None = None,
    **more: Any,
) -> Outcome:
    """Run a search on an executor, or on several: the time is then that of the one that took most."""
    executors = [executor] if isinstance(executor, SimulatedExecutor) else list(executor)
    book = journal or Journal(None, "tune_journal/2", {})
    earlier = book.elapsed
    measurements = Measurements(book, executors, lambda: earlier + max(executor.now for executor in executors), cancel)
    return Search(spec or TuneSpec(), space, planner, measurements, progress=progress, **more).run()
