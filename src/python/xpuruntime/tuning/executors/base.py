# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Executor`: interface of what opens and measures candidates on one device; `SessionExecutor`: its shared part."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.tuning.trial import CandidateFailed, OutOfTime, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.tuning.devices import TrialDevice
    from xpuruntime.tuning.executors.runner import RunnerJob
    from xpuruntime.tuning.spec.parts import Constraints
    from xpuruntime.tuning.trial import Candidate

__all__ = ["FRESH_PROCESS_OBJECTIVES", "Executor", "SessionExecutor", "check_constraints"]

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
            found = self._checked(candidate)
        except CandidateFailed as failed:
            self.close(candidate)
            return Trial(code=failed.code, reason=failed.reason, seconds=time.monotonic() - began)
        except OutOfTime:
            self.close(candidate)
            raise
        trial = check_constraints(found, self._constraints, time.monotonic() - began)
        if trial.code is not None or self._job_of(candidate).objective in FRESH_PROCESS_OBJECTIVES:
            self.close(candidate)
        return trial

    @abstractmethod
    def _checked(self, candidate: Candidate) -> dict[str, Any]:
        """Open a candidate and return what `Runner.check` does."""

    def _job(self, candidate: Candidate) -> RunnerJob:
        """Return the job of a candidate on this device."""
        job = self._job_of(candidate)
        execution = job.policy.get("execution", {})
        policy = job.policy
        if self.device.device != candidate.device:
            policy = {**policy, "execution": {**execution, "device": self.device.device}}
        return msgspec.structs.replace(job, policy=policy, timed=self._timed)


def check_constraints(found: dict[str, Any], constraints: Constraints, seconds: float) -> Trial:
    """Return the trial of a candidate that was opened and compared: whether it keeps the constraints."""
    start, memory = found["start"], found["memory"]
    code: CandidateCode | None = None
    reason = ""
    if not found["passed"]:
        code, reason = CandidateCode.INACCURATE, found["reason"]
    elif constraints.start is not None and start > constraints.start:
        code, reason = (
            CandidateCode.SLOW_START,
            f"its first result took {start:.3g} s, over the {constraints.start:g} s allowed",
        )
    elif constraints.memory_peak is not None and memory is not None and memory > constraints.memory_peak:
        code, reason = CandidateCode.MEMORY, f"it held {memory:,} bytes, over the {constraints.memory_peak:,} allowed"
    return Trial(
        code=code, reason=reason, start=start, memory=memory, error=found["error"], cosine=found["cosine"],
        run=found["run"], graph=found["graph"], seconds=seconds,
    )  # fmt: skip
