# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Benches, where candidates are opened and measured: each in a process of its own, or all in this one."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.errors import AccuracyError, XpuRuntimeError
from xpuruntime.measuring.worker import FailureKind, Worker, WorkerFailure
from xpuruntime.tuning.records import CandidateFailed, Trial
from xpuruntime.tuning.runner import Job, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.tuning.records import Candidate, Code
    from xpuruntime.tuning.spec import Constraints

__all__ = ["FRESH", "Bench", "LocalBench", "ProcessBench"]

#: Objectives whose figure is that of a process that is started for it.
FRESH = ("memory", "cold_start")
_RUNNER = "xpuruntime.tuning.runner"
#: Seconds that opening, a turn, and other calls may take at most.
_OPEN, _TURN, _CALL = 300.0, 120.0, 600.0
#: Inputs that a turn goes through at most, and seconds beyond which it has fewer of them.
_MOST_TIMED, _LONG_TURN = 8, 0.1
#: Share of the memory that is free which one candidate may take.
_SHARE = 0.8
_CODES: dict[FailureKind, Code] = {
    FailureKind.CRASHED: "crashed",
    FailureKind.TIMEOUT: "timeout",
    FailureKind.OUT_OF_MEMORY: "memory",
    FailureKind.EXITED: "crashed",
    FailureKind.PROTOCOL: "crashed",
}


class Bench(Protocol):
    """Measures candidates. Each method but `close` and `trial` raises `CandidateFailed`."""

    def pace(self, run: float | None) -> None:
        """Settle how many inputs a turn goes through, from the seconds of a run of the control: before any turn."""

    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate and compare its outputs; it may stay open."""

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of one turn, small where it is good."""

    def tail(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit: ``runs``, ``over`` and ``p99``."""

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade: ``reached`` and ``reason``."""

    def shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""

    def fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and return the figures of a turn of each, in their order and then back."""

    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all."""


class _Pace:
    """How many inputs a turn goes through: the same for all candidates, since inputs may differ in cost."""

    _job_of: Callable[[Candidate], Job]
    _timed = _MOST_TIMED

    def pace(self, run: float | None) -> None:
        """Settle it from the seconds of a run of the control."""
        if run:
            self._timed = max(1, min(_MOST_TIMED, math.ceil(_LONG_TURN / run)))

    def _job(self, candidate: Candidate) -> Job:
        return msgspec.structs.replace(self._job_of(candidate), timed=self._timed)


class ProcessBench(_Pace):
    """Gives every candidate a worker process of its own.

    Parameters
    ----------
    job_of : callable
        From a candidate to its `Job`.
    constraints : Constraints
        A process that passes the limit of memory is ended.
    """

    def __init__(self, job_of: Callable[[Candidate], Job], constraints: Constraints) -> None:
        self._job_of, self._constraints = job_of, constraints
        self._limit = constraints.memory_peak or _free_memory()
        self._open = _OPEN if constraints.start is None else min(_OPEN, 2 * constraints.start + 2)
        self._workers: dict[str, Worker] = {}

    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate in a worker and compare its outputs; it stays open where it keeps the constraints."""
        began = time.monotonic()
        try:
            worker, start = self._started(candidate)
            found = _called(worker, "check", _CALL)
        except CandidateFailed as failed:
            self.close(candidate)
            return Trial(code=failed.code, reason=failed.reason, seconds=time.monotonic() - began)
        trial = judged({**found, "start": start}, self._constraints, time.monotonic() - began)
        if trial.code is not None or self._job_of(candidate).objective in FRESH:
            self.close(candidate)
        return trial

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of a turn."""
        objective = self._job_of(candidate).objective
        return self._fresh(candidate, objective) if objective in FRESH else self._steady(self._worker(candidate))

    def tail(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit."""
        worker = self._worker(candidate)
        found: dict[str, Any] = _called(worker, "tail", _CALL, limit=limit, runs=runs, seconds=seconds)
        if found["wrong"]:
            raise CandidateFailed("inaccurate", found["wrong"])
        return found

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        found: dict[str, Any] = _called(self._worker(candidate), "determinism", math.inf, grade=grade)
        return found

    def shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        found: dict[str, float] = _called(self._worker(candidate), "shares", _CALL)
        return found

    def fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates in fresh processes, at the same time, and time them one after the other and back (ABBA)."""
        self.close()
        order = (*candidates, *reversed(candidates))
        objective = self._job_of(candidates[0]).objective
        if objective in FRESH:
            return [self._fresh(one, objective) for one in order]
        with ThreadPoolExecutor(len(candidates)) as threads:
            opening = [threads.submit(self._started, one) for one in candidates]
        try:
            workers = {one.id: each.result()[0] for one, each in zip(candidates, opening, strict=True)}
            for one in candidates:
                _called(workers[one.id], "prepare", _TURN)
            return [self._steady(workers[one.id]) for one in order]
        finally:
            self.close()

    def close(self, candidate: Candidate | None = None) -> None:
        """End the process of a candidate, or all."""
        for name in list(self._workers) if candidate is None else [candidate.id]:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.close()

    def _worker(self, candidate: Candidate) -> Worker:
        worker = self._workers.get(candidate.id)
        return worker if worker is not None and worker.alive else self._started(candidate)[0]

    def _started(self, candidate: Candidate) -> tuple[Worker, float]:
        """Start a worker and open the candidate in it. Return it, and the seconds until the first result."""
        self.close(candidate)
        job = msgspec.to_builtins(self._job(candidate))
        try:
            worker = self._workers[candidate.id] = Worker(memory_limit=self._limit, timeout=_CALL)
        except WorkerFailure as failure:
            raise CandidateFailed(_CODES.get(failure.kind, "open_failed"), _first_line(failure.reason)) from failure
        return worker, float(_called(worker, None, self._open, job=job)["start"])

    def _steady(self, worker: Worker) -> float:
        found = _called(worker, "turn", _TURN)
        if found["wrong"]:
            raise CandidateFailed("inaccurate", found["wrong"])
        return float(found["figure"])

    def _fresh(self, candidate: Candidate, objective: str) -> float:
        """Return what a fresh process takes: seconds from its start to the first result, or the most memory."""
        began = time.monotonic()
        try:
            worker, _ = self._started(candidate)
            elapsed = time.monotonic() - began
            if objective == "cold_start":
                return elapsed
            found = _called(worker, "check", _CALL)
            if not found["passed"]:
                raise CandidateFailed("inaccurate", found["reason"])
            return float(found["memory"] or math.nan)
        finally:
            self.close(candidate)


class LocalBench(_Pace):
    """Opens candidates in this process, where a crash or a hang ends all."""

    def __init__(
        self, job_of: Callable[[Candidate], Job], constraints: Constraints, registry: EngineRegistry | None
    ) -> None:
        self._job_of, self._constraints, self._registry = job_of, constraints, registry
        self._runners: dict[str, Runner] = {}

    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate and compare its outputs."""
        began = time.monotonic()
        try:
            found = self._call(candidate, "check")
        except CandidateFailed as failed:
            self.close(candidate)
            return Trial(code=failed.code, reason=failed.reason, seconds=time.monotonic() - began)
        trial = judged({**found, "memory": None}, self._constraints, time.monotonic() - began)
        if trial.code is not None:
            self.close(candidate)
        return trial

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of a turn."""
        return float(self._call(candidate, "turn")["figure"])

    def tail(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit."""
        return self._call(candidate, "tail", limit=limit, runs=runs, seconds=seconds)

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        return self._call(candidate, "determinism", grade=grade)

    def shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        return self._call(candidate, "shares")

    def fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and time them one after the other and back."""
        self.close()
        return [self.turn(one) for one in (*candidates, *reversed(candidates))]

    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all."""
        for name in list(self._runners) if candidate is None else [candidate.id]:
            runner = self._runners.pop(name, None)
            if runner is not None:
                runner.close()

    def _call(self, candidate: Candidate, method: str, **arguments: Any) -> dict[str, Any]:
        try:
            runner = self._runners.get(candidate.id)
            if runner is None:
                runner = self._runners[candidate.id] = Runner(self._job(candidate), self._registry)
            found: dict[str, Any] = getattr(runner, method)(**arguments)
        except Exception as error:  # an engine of someone else's may raise anything
            code: Code = "inaccurate" if isinstance(error, AccuracyError) else "open_failed"
            named = str(error) if isinstance(error, XpuRuntimeError) else f"{type(error).__name__}: {error}"
            raise CandidateFailed(code, _first_line(named)) from error
        if found.get("wrong"):
            raise CandidateFailed("inaccurate", found["wrong"])
        return found


def judged(found: dict[str, Any], constraints: Constraints, seconds: float) -> Trial:
    """Return the trial of a candidate that was opened and compared: whether it keeps the constraints."""
    start, memory = found["start"], found["memory"]
    code: Code | None = None
    reason = ""
    if not found["passed"]:
        code, reason = "inaccurate", found["reason"]
    elif constraints.start is not None and start > constraints.start:
        code, reason = "slow_start", f"its first result took {start:.3g} s, over the {constraints.start:g} s allowed"
    elif constraints.memory_peak is not None and memory is not None and memory > constraints.memory_peak:
        code, reason = "memory", f"it held {memory:,} bytes, over the {constraints.memory_peak:,} allowed"
    return Trial(
        code=code, reason=reason, start=start, memory=memory, error=found["error"], cosine=found["cosine"],
        run=found["run"], seconds=seconds,
    )  # fmt: skip


def _called(worker: Worker, method: str | None, timeout: float, **arguments: Any) -> Any:
    """Call the runner of a worker, or open it. A failure has the words of a candidate's."""
    try:
        if method is None:
            return worker.call(f"{_RUNNER}:open_runner", timeout=timeout, **arguments)
        return worker.call(f"{_RUNNER}:call", timeout=timeout, method=method, **arguments)
    except WorkerFailure as failure:
        code = _CODES.get(failure.kind)
        if code is None:
            code = (
                "inaccurate"
                if "AccuracyError" in failure.exceptions
                else "open_failed"
                if method is None
                else "run_failed"
            )
        what = "opening it" if method is None else method
        reason = failure.reason.replace(f"{_RUNNER}:open_runner", what).replace(f"{_RUNNER}:call", what)
        raise CandidateFailed(code, _first_line(reason)) from failure


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]


def _free_memory() -> int | None:
    """Return a share of the memory that the system says is available; ``None`` where it says nothing."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        size = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    return int(size * 1024 * _SHARE)
