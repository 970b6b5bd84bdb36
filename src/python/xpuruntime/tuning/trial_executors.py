# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Executors: where candidates are opened and measured, in this process or in worker processes."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import AccuracyError, XpuRuntimeError
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.printable import error_line, first_line
from xpuruntime.runtime.cpu_and_memory import available_memory
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure
from xpuruntime.tuning.runner import Runner, RunnerJob
from xpuruntime.tuning.trial import Candidate, CandidateFailed, OutOfTime, Trial, TrialDevice

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.tuning.spec.parts import Constraints

#: Objectives whose figure is that of a process that is started for it.
FRESH_PROCESS_OBJECTIVES = ("memory", "cold_start")
#: Inputs that a turn goes through at most, and seconds beyond which it has fewer of them.
_MOST_TIMED, _LONG_TURN = 8, 0.1


class Executor(ABC):
    """Measures candidates on one device.

    Methods that measure raise `DeviceLost` where the device went away, and `OutOfTime` where the budget ended; all of
    them but `trial` raise `CandidateFailed`.
    """

    device: TrialDevice
    time_left: Callable[[], float] = staticmethod(lambda: math.inf)

    @abstractmethod
    def calibrate(self, run: float | None) -> None:
        """Settle how many inputs a turn goes through, from the seconds of a run of the control: before any turn."""

    @abstractmethod
    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate and compare its outputs; it may stay open."""

    @abstractmethod
    def turn(self, candidate: Candidate) -> float:
        """Return the figure of one turn, small where it is good."""

    @abstractmethod
    def count_slow_runs(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit: ``runs``, ``over`` and ``p99``."""

    @abstractmethod
    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade: ``reached`` and ``reason``."""

    @abstractmethod
    def op_time_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""

    @abstractmethod
    def measure_fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and return the figures of a turn of each, in their order and then back (ABBA)."""

    @abstractmethod
    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all."""

    def kill(self) -> None:
        """End what is measured, from any thread; nothing is measured after it."""
        return

    def replace_device(self) -> str:
        """Go on on a device that is like one that was lost; return why that cannot be, ``""`` where it can."""
        return "there is no other"


class SessionExecutor(Executor):
    """Base of executors on this machine: opens sessions of candidates."""

    def __init__(self, job_of: Callable[[Candidate], RunnerJob], constraints: Constraints, device: TrialDevice) -> None:
        self._job_of, self._constraints, self.device = job_of, constraints, device
        self._timed = _MOST_TIMED

    def calibrate(self, run: float | None) -> None:
        """Settle how many inputs a turn goes through: as many for all candidates, since inputs may differ in cost."""
        if run:
            self._timed = max(1, min(_MOST_TIMED, math.ceil(_LONG_TURN / run)))

    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate and compare its outputs; it stays open where it keeps the constraints."""
        began = time.monotonic()
        try:
            checked = self._checked(candidate)
        except CandidateFailed as failed:
            self.close(candidate)
            return Trial(code=failed.code, reason=failed.reason, seconds=time.monotonic() - began)
        except OutOfTime:
            self.close(candidate)
            raise
        trial = check_constraints(checked, self._constraints, time.monotonic() - began)
        if trial.code is not None or self._job_of(candidate).objective in FRESH_PROCESS_OBJECTIVES:
            self.close(candidate)
        return trial

    @abstractmethod
    def _checked(self, candidate: Candidate) -> dict[str, Any]:
        """Open a candidate and return what `Runner.check` does."""

    def _job(self, candidate: Candidate) -> RunnerJob:
        job = self._job_of(candidate)
        execution = job.policy.get("execution", {})
        policy = job.policy
        if self.device.device != candidate.device:
            policy = {**policy, "execution": {**execution, "device": self.device.device}}
        return msgspec.structs.replace(job, policy=policy, timed=self._timed)


def check_constraints(measured: dict[str, Any], constraints: Constraints, seconds: float) -> Trial:
    """Return the trial of a candidate that was opened and compared: whether it keeps the constraints."""
    start, memory = measured["start"], measured["memory"]
    code: CandidateCode | None = None
    reason = ""
    if not measured["passed"]:
        code, reason = CandidateCode.INACCURATE, measured["reason"]
    elif constraints.start is not None and start > constraints.start:
        code, reason = (
            CandidateCode.SLOW_START,
            f"its first result took {start:.3g} s, over the {constraints.start:g} s allowed",
        )
    elif constraints.memory_peak is not None and memory is not None and memory > constraints.memory_peak:
        code, reason = CandidateCode.MEMORY, f"it held {memory:,} bytes, over the {constraints.memory_peak:,} allowed"
    return Trial(
        code=code, reason=reason, start=start, memory=memory, error=measured["error"], cosine=measured["cosine"],
        run=measured["run"], graph=measured["graph"], seconds=seconds,
    )  # fmt: skip


class LocalExecutor(SessionExecutor):
    """Opens candidates in this process, where a crash or a hang ends all."""

    def __init__(
        self,
        job_of: Callable[[Candidate], RunnerJob],
        constraints: Constraints,
        device: TrialDevice,
        registry: EngineRegistry | None,
    ) -> None:
        super().__init__(job_of, constraints, device)
        self._registry = registry
        self._runners: dict[str, Runner] = {}

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of a turn."""
        return float(self._call(candidate, "turn")["figure"])

    def count_slow_runs(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit."""
        return self._call(candidate, "count_slow_runs", limit=limit, runs=runs, seconds=seconds)

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        return self._call(candidate, "determinism", grade=grade)

    def op_time_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        return self._call(candidate, "op_time_shares")

    def measure_fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and time them one after the other and back."""
        self.close()
        return [self.turn(candidate) for candidate in (*candidates, *reversed(candidates))]

    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all."""
        for name in list(self._runners) if candidate is None else [candidate.id]:
            runner = self._runners.pop(name, None)
            if runner is not None:
                runner.close()

    def _checked(self, candidate: Candidate) -> dict[str, Any]:
        return {**self._call(candidate, "check"), "memory": None}

    def _call(self, candidate: Candidate, method: str, **arguments: Any) -> dict[str, Any]:
        try:
            runner = self._runners.get(candidate.id)
            if runner is None:
                runner = self._runners[candidate.id] = Runner(self._job(candidate), self._registry)
            results: dict[str, Any] = getattr(runner, method)(**arguments)
        except Exception as error:  # an engine of someone else's may raise anything
            code: CandidateCode = (
                CandidateCode.INACCURATE if isinstance(error, AccuracyError) else CandidateCode.OPEN_FAILED
            )
            said = error_line(error, named=not isinstance(error, XpuRuntimeError))
            raise CandidateFailed(code, said[:500]) from error
        if results.get("wrong"):
            raise CandidateFailed(CandidateCode.INACCURATE, results["wrong"])
        return results


_RUNNER = "xpuruntime.tuning.runner"
#: Seconds that opening, a turn, and other calls may take at most.
_OPEN, _TURN, _CALL = 300.0, 120.0, 600.0
#: Share of what is left of the budget that opening one candidate may take, and seconds that it may take in any case.
_OPEN_SHARE, _OPEN_LEAST = 0.25, 30.0
#: Share of the memory that is free which one candidate may take.
_SHARE = 0.8
_CODES: dict[FailureKind, CandidateCode] = {
    FailureKind.CRASHED: CandidateCode.CRASHED,
    FailureKind.TIMEOUT: CandidateCode.TIMEOUT,
    FailureKind.OUT_OF_MEMORY: CandidateCode.MEMORY,
    FailureKind.EXITED: CandidateCode.CRASHED,
    FailureKind.PROTOCOL: CandidateCode.CRASHED,
}


class ProcessExecutor(SessionExecutor):
    """Gives every candidate a worker process of its own."""

    def __init__(self, job_of: Callable[[Candidate], RunnerJob], constraints: Constraints, device: TrialDevice) -> None:
        super().__init__(job_of, constraints, device)
        self._limit = constraints.memory_peak or available_memory(_SHARE)
        self._open = _OPEN if constraints.start is None else min(_OPEN, 2 * constraints.start + 2)
        self._workers: dict[str, Worker] = {}
        self._killed = False

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of a turn."""
        objective = self._job_of(candidate).objective
        return (
            self._fresh(candidate, objective)
            if objective in FRESH_PROCESS_OBJECTIVES
            else self._steady(self._worker(candidate))
        )

    def count_slow_runs(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit."""
        worker = self._worker(candidate)
        slow_runs: dict[str, Any] = self._called(
            worker, "count_slow_runs", _CALL, limit=limit, runs=runs, seconds=seconds
        )
        if slow_runs["wrong"]:
            raise CandidateFailed(CandidateCode.INACCURATE, slow_runs["wrong"])
        return slow_runs

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        results: dict[str, Any] = self._called(self._worker(candidate), "determinism", math.inf, grade=grade)
        return results

    def op_time_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        shares: dict[str, float] = self._called(self._worker(candidate), "op_time_shares", _CALL)
        return shares

    def measure_fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates in fresh processes, at the same time, and time them one after the other and back (ABBA)."""
        self.close()
        order = (*candidates, *reversed(candidates))
        objective = self._job_of(candidates[0]).objective
        if objective in FRESH_PROCESS_OBJECTIVES:
            return [self._fresh(candidate, objective) for candidate in order]
        with ThreadPoolExecutor(len(candidates)) as threads:
            opening = [threads.submit(self._started, candidate) for candidate in candidates]
        try:
            workers = {candidate.id: each.result()[0] for candidate, each in zip(candidates, opening, strict=True)}
            for candidate in candidates:
                self._called(workers[candidate.id], "prepare", _TURN)
            return [self._steady(workers[candidate.id]) for candidate in order]
        finally:
            self.close()

    def close(self, candidate: Candidate | None = None) -> None:
        """End the process of a candidate, or all."""
        for name in list(self._workers) if candidate is None else [candidate.id]:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.close()

    def kill(self) -> None:
        """End all processes, from any thread."""
        self._killed = True
        for worker in list(self._workers.values()):
            worker.kill()

    def _checked(self, candidate: Candidate) -> dict[str, Any]:
        worker, start = self._started(candidate)
        return {**self._called(worker, "check", _CALL), "start": start}

    def _worker(self, candidate: Candidate) -> Worker:
        worker = self._workers.get(candidate.id)
        return worker if worker is not None and worker.alive else self._started(candidate)[0]

    def _started(self, candidate: Candidate) -> tuple[Worker, float]:
        self.close(candidate)
        job = msgspec.to_builtins(self._job(candidate))
        try:
            worker = Worker(memory_limit=self._limit, timeout=_CALL, cores=self.device.cores)
        except WorkerFailure as failure:
            raise CandidateFailed(
                _CODES.get(failure.kind, CandidateCode.OPEN_FAILED), first_line(failure.reason)[:500]
            ) from failure
        self._workers[candidate.id] = worker
        if self._killed:
            self.close(candidate)
            raise CandidateFailed(CandidateCode.CRASHED, "the search was ended")
        most = min(self._open, max(_OPEN_SHARE * self.time_left(), _OPEN_LEAST))
        return worker, float(self._called(worker, None, most, job=job)["start"])

    def _steady(self, worker: Worker) -> float:
        answer = self._called(worker, "turn", _TURN)
        if answer["wrong"]:
            raise CandidateFailed(CandidateCode.INACCURATE, answer["wrong"])
        return float(answer["figure"])

    def _fresh(self, candidate: Candidate, objective: str) -> float:
        """Return what a fresh process takes: seconds from its start to the first result, or the most memory."""
        began = time.monotonic()
        try:
            worker, _ = self._started(candidate)
            elapsed = time.monotonic() - began
            if objective == "cold_start":
                return elapsed
            answer = self._called(worker, "check", _CALL)
            if not answer["passed"]:
                raise CandidateFailed(CandidateCode.INACCURATE, answer["reason"])
            return float(answer["memory"] or math.nan)
        finally:
            self.close(candidate)

    def _called(self, worker: Worker, method: str | None, timeout: float, **arguments: Any) -> Any:
        """Call the runner of a worker, or open it, until the budget ends. A failure has the words of a candidate's."""
        what = "opening it" if method is None else method
        left = max(self.time_left(), 0.0)
        limit = min(timeout, left)
        try:
            if method is None:
                return worker.call(f"{_RUNNER}:open_runner", timeout=limit, called=what, **arguments)
            return worker.call(f"{_RUNNER}:call", timeout=limit, called=what, method=method, **arguments)
        except WorkerFailure as failure:
            if failure.kind is FailureKind.TIMEOUT and left < timeout:
                raise OutOfTime from failure
            code = _CODES.get(failure.kind)
            if code is None:
                failed = CandidateCode.OPEN_FAILED if method is None else CandidateCode.RUN_FAILED
                code = CandidateCode.INACCURATE if "AccuracyError" in failure.exceptions else failed
            raise CandidateFailed(code, first_line(failure.reason)[:500]) from failure
