# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RequestQueue`: asynchronous runs on OpenVINO's own requests."""

from __future__ import annotations

import queue
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import closed
from xpuruntime.engines.run_threads import LINGER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.engines.openvino.slots import Slot, SlotPool
    from xpuruntime.errors import XpuRuntimeError

__all__ = ["RequestQueue"]


class _Job:
    def __init__(self, arrays: Sequence[Any], finish: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.arrays, self.finish = arrays, finish
        self.future: Future[dict[str, Any]] = Future()


class RequestQueue:
    """Starts as many requests as OpenVINO runs well side by side, and keeps the others, which can be cancelled.

    One thread waits for the requests in the order in which they were started, and ends when there are none. OpenVINO's
    callbacks are not used: a run that fails does not call them.

    Parameters
    ----------
    pool : SlotPool
    failed : callable
        Makes one of our errors of one of OpenVINO's.
    limit : int
        Requests in flight.
    """

    def __init__(self, pool: SlotPool, failed: Callable[[Exception], XpuRuntimeError], limit: int) -> None:
        self._pool, self._failed = pool, failed
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._started: queue.SimpleQueue[tuple[_Job, Slot]] = queue.SimpleQueue()
        self._running = 0
        self._open = True
        self._thread: threading.Thread | None = None

    def submit(
        self, arrays: Sequence[Any], finish: Callable[[Sequence[Any]], dict[str, Any]]
    ) -> Future[dict[str, Any]]:
        """Run checked, contiguous arrays, now or when a request is free; `finish` makes the answer of the outputs."""
        job = _Job(arrays, finish)
        with self._lock:
            if not self._open:
                closed()
            self._waiting.append(job)
            self._start()
        return job.future

    def close(self) -> None:
        """Cancel what has not been started. What runs finishes, and its future gets its answer."""
        with self._lock:
            self._open = False
            waiting, self._waiting = self._waiting, deque()
        for job in waiting:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()

    def _start(self) -> None:
        """Start what can be started. Under the lock."""
        while self._waiting and self._running < self._limit:
            job = self._waiting.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                slot = self._pool.take()
                slot.prepare(job.arrays, tuple(array.shape for array in job.arrays))
                slot.start()
            except Exception as error:
                job.future.set_exception(self._failed(error))
                continue
            self._running += 1
            self._started.put((job, slot))
        if self._running and self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="xpuruntime-openvino")
            self._thread.start()

    def _wait(self) -> None:
        while True:
            try:
                job, slot = self._started.get(timeout=LINGER)
            except queue.Empty:
                with self._lock:
                    if self._running == 0:
                        self._thread = None
                        return
                continue
            outcome: Any
            try:
                outcome = job.finish(slot.wait())
            except Exception as error:
                outcome = self._failed(error)
            with self._lock:
                self._running -= 1
                if not isinstance(outcome, Exception):
                    self._pool.free.append(slot)
                self._start()
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
            del job, slot, outcome
