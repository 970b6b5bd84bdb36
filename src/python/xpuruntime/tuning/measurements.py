# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Measurements`: measurements on one or more devices, recalled from the journal where it has them."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime import _core
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.runtime.interruptible_waits import BackgroundCall, ConditionVariable
from xpuruntime.tuning.trial import CandidateFailed, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.files.journal import Journal
    from xpuruntime.tuning.trial_executors import Executor

__all__ = ["Measurements"]

T = TypeVar("T")


class _Stopped(Exception):  # noqa: N818  of threads, whose cause is raised elsewhere
    """Another thread failed, or the user ended the search."""


class Measurements:
    """The executors of a search and its journal: what is in the journal is not measured again."""

    def __init__(
        self,
        journal: Journal,
        executors: Sequence[Executor],
        clock: Callable[[], float],
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.clock = clock
        self._journal, self._executors, self._cancel = journal, list(executors), cancel
        self._gone: list[Executor] = []
        #: What was measured once more, and why.
        self.notes: list[str] = []
        self._stopped = False
        self._losing = threading.Lock()

    @property
    def executors(self) -> list[Executor]:
        """The executors whose device is there, in order."""
        return [executor for executor in self._executors if executor not in self._gone]

    @property
    def main_executor(self) -> Executor:
        """The first of them, where everything is measured that is not spread."""
        return self.executors[0]

    @property
    def cancelled(self) -> bool:
        """Whether the search is to end."""
        return self._cancel is not None and self._cancel()

    def due(self, key: str, deadline: float) -> bool:
        """Whether something may be measured: it was before, or there is time left."""
        return self._journal.has(key) or (self.clock() < deadline and not self.cancelled)

    def device(self, key: str) -> str | None:
        """Return the name of the device that something was measured on at last."""
        return self._journal.device(_retry_key(key)) or self._journal.device(key)

    def measure(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        """Recall a measurement, or make it. One whose device goes away is made once more, on another device."""
        measurement = self._recall_or_measure(executor, key, measure)
        if isinstance(measurement, dict) and measurement.get("another"):
            self.notes.append(f"{measurement['lost']}; {key} was measured once more, on another one")
            measurement = self._recall_or_measure(executor, _retry_key(key), measure)
        if isinstance(measurement, dict) and "lost" in measurement:
            raise CandidateFailed(CandidateCode.NODE_LOST, measurement["lost"])
        if isinstance(measurement, dict) and "failed" in measurement:
            raise CandidateFailed(*measurement["failed"])
        return measurement

    def run_in_parallel(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do jobs at the same time, one for each executor, and return what they do. One that raises ends the others."""
        if len(jobs) == 1:
            return [jobs[0]()]
        doing: list[BackgroundCall[T]] = []
        try:
            results: list[T] = self._run_all(jobs, doing)
        except BaseException:
            for call in doing:
                call.done.wait()
            raise
        return results

    def _in_parallel(self, jobs: Sequence[Callable[[], T]], doing: list[BackgroundCall[T]]) -> list[T]:
        lock = threading.Lock()
        changed = ConditionVariable(lock)
        ended = 0
        failed: list[BaseException] = []

        def watched(job: Callable[[], T]) -> T:
            nonlocal ended
            try:
                return job()
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                with lock:
                    ended += 1
                    changed.notify_all()

        for number, job in enumerate(jobs):
            doing.append(BackgroundCall(functools.partial(watched, job), f"xpuruntime-tune_{number}"))
        changed.wait_for(lambda: bool(failed) or ended == len(jobs))
        if failed:
            raise failed[0]
        return [future.result() for future in doing]

    def _stop(self) -> None:
        self._stopped = True
        for executor in self._executors:
            executor.kill()

    _run_all = _core.guarded(_in_parallel, _stop)

    def _recall_or_measure(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        result = self._journal.recall(key) if self._journal.has(key) else self._measure_now(executor, key, measure)
        if isinstance(result, dict) and "lost" in result and not result["another"] and executor not in self._gone:
            self._gone.append(executor)
        return result

    def _measure_now(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        device = executor.device.name
        try:
            measurement = measure()
        except CandidateFailed as failed:
            measurement = {"failed": [failed.code, failed.reason]}
        except DeviceLost as lost:
            if self._stopped:
                raise _Stopped from lost
            measurement = self._replace_device(executor, str(lost))
        if self._stopped:
            raise _Stopped
        return self._journal.record(key, measurement, self.clock(), device)

    def _replace_device(self, executor: Executor, reason: str) -> dict[str, Any]:
        """Have an executor go on elsewhere, and return what the journal says of it."""
        why_not = executor.replace_device()
        with self._losing:
            if why_not and len(self.executors) == 1:
                raise DeviceLost(f"{reason}; {why_not}. Fix: go on with --resume when there is a device again")
            if why_not:
                self._gone.append(executor)
        return {"lost": f"{reason}; {why_not}" if why_not else reason, "another": not why_not}


def _retry_key(key: str) -> str:
    """Return the key of a measurement that is made once more."""
    return f"{key}/again"
