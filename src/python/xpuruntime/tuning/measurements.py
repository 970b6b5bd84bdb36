# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Measurements`: what is measured, on which device, through the journal; on several devices at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime.measuring.candidate_codes import CandidateCode
from xpuruntime.tuning.records import CandidateFailed, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.tuning.bench import Bench
    from xpuruntime.tuning.journal import Journal

__all__ = ["Measurements"]

T = TypeVar("T")


class _Stopped(Exception):  # noqa: N818  of threads, whose cause is raised elsewhere
    """Another thread failed, or the user ended the search."""


class Measurements:
    """The benches of a search and its journal: what is in the journal is not measured again.

    Parameters
    ----------
    journal : Journal
    benches : sequence of Bench
        One for each device.
    clock : callable
        Seconds that the search has taken; starts at what the journal says.
    cancel : callable, optional
        True ends the search.
    """

    def __init__(
        self,
        journal: Journal,
        benches: Sequence[Bench],
        clock: Callable[[], float],
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.clock = clock
        self._journal, self._benches, self._cancel = journal, list(benches), cancel
        self._gone: list[Bench] = []
        #: What was measured once more, and why.
        self.notes: list[str] = []
        self._stopped = threading.Event()
        self._losing = threading.Lock()

    @property
    def benches(self) -> list[Bench]:
        """The benches whose device is there, in order."""
        return [one for one in self._benches if one not in self._gone]

    @property
    def main(self) -> Bench:
        """The first of them, where everything is measured that is not spread."""
        return self.benches[0]

    @property
    def cancelled(self) -> bool:
        """Whether the search is to end."""
        return self._cancel is not None and self._cancel()

    def due(self, key: str, deadline: float) -> bool:
        """Whether something may be measured: it was before, or there is time left."""
        return self._journal.has(key) or (self.clock() < deadline and not self.cancelled)

    def device(self, key: str) -> str | None:
        """Return the name of the device that something was measured on at last."""
        return self._journal.device(_again(key)) or self._journal.device(key)

    def measured(self, bench: Bench, key: str, measure: Callable[[], Any]) -> Any:
        """Recall a measurement, or make it. One whose device goes away is made once more, on another device.

        Raises
        ------
        CandidateFailed
        DeviceLost
            There is no device left.
        """
        found = self._once(bench, key, measure)
        if isinstance(found, dict) and found.get("another"):
            self.notes.append(f"{found['lost']}; {key} was measured once more, on another one")
            found = self._once(bench, _again(key), measure)
        if isinstance(found, dict) and "lost" in found:
            raise CandidateFailed(CandidateCode.NODE_LOST, found["lost"])
        if isinstance(found, dict) and "failed" in found:
            raise CandidateFailed(*found["failed"])
        return found

    def side_by_side(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do jobs at the same time, one for each bench, and return what they do. One that raises ends the others."""
        if len(jobs) == 1:
            return [jobs[0]()]
        with ThreadPoolExecutor(len(jobs), thread_name_prefix="xpuruntime-tune") as threads:
            doing = [threads.submit(job) for job in jobs]
            try:
                wait(doing, return_when=FIRST_EXCEPTION)
                failed = [error for one in doing if one.done() and (error := one.exception()) is not None]
                if failed:
                    raise failed[0]
                return [one.result() for one in doing]
            except BaseException:
                self._stopped.set()
                for bench in self._benches:
                    bench.kill()
                raise

    def _once(self, bench: Bench, key: str, measure: Callable[[], Any]) -> Any:
        found = self._journal.recall(key) if self._journal.has(key) else self._made(bench, key, measure)
        if isinstance(found, dict) and "lost" in found and not found["another"] and bench not in self._gone:
            self._gone.append(bench)
        return found

    def _made(self, bench: Bench, key: str, measure: Callable[[], Any]) -> Any:
        device = bench.device.name
        try:
            found = measure()
        except CandidateFailed as failed:
            found = {"failed": [failed.code, failed.reason]}
        except DeviceLost as lost:
            if self._stopped.is_set():
                raise _Stopped from lost
            found = self._replaced(bench, str(lost))
        if self._stopped.is_set():
            raise _Stopped
        return self._journal.record(key, found, self.clock(), device)

    def _replaced(self, bench: Bench, reason: str) -> dict[str, Any]:
        """Have a bench go on elsewhere, and return what the journal says of it."""
        why_not = bench.renew()
        with self._losing:
            if why_not and len(self.benches) == 1:
                raise DeviceLost(f"{reason}; {why_not}. Fix: go on with --resume when there is a device again")
            if why_not:
                self._gone.append(bench)
        return {"lost": f"{reason}; {why_not}" if why_not else reason, "another": not why_not}


def _again(key: str) -> str:
    """Return the key of a measurement that is made once more."""
    return f"{key}/again"
