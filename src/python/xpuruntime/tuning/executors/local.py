# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LocalExecutor`: runs all candidates in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.error_text import error_line
from xpuruntime.errors import AccuracyError, XpuRuntimeError
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.tuning.executors.base import SessionExecutor
from xpuruntime.tuning.executors.runner import Runner
from xpuruntime.tuning.trial import CandidateFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.tuning.devices import TrialDevice
    from xpuruntime.tuning.executors.runner import RunnerJob
    from xpuruntime.tuning.spec.parts import Constraints
    from xpuruntime.tuning.trial import Candidate

__all__ = ["LocalExecutor"]


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
        return [self.turn(one) for one in (*candidates, *reversed(candidates))]

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
            found: dict[str, Any] = getattr(runner, method)(**arguments)
        except Exception as error:  # an engine of someone else's may raise anything
            code: CandidateCode = (
                CandidateCode.INACCURATE if isinstance(error, AccuracyError) else CandidateCode.OPEN_FAILED
            )
            said = error_line(error, named=not isinstance(error, XpuRuntimeError))
            raise CandidateFailed(code, said[:500]) from error
        if found.get("wrong"):
            raise CandidateFailed(CandidateCode.INACCURATE, found["wrong"])
        return found
