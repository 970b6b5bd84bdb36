# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RunThreads`: the few threads that run a model asynchronously where its engine has no requests of its own."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LINGER", "RunThreads"]

#: Seconds that a thread stays when there is nothing to do.
LINGER = 0.25


class _Job:
    def __init__(self, call: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
        self.call, self.arguments = call, arguments
        self.future: Future[dict[str, Any]] = Future()


class RunThreads:
    """Runs calls in the order in which they came, a few at a time.

    Threads start when there is work and end soon after there is none, so that nothing has to be stopped, and nothing
    but the work keeps the model alive. Unlike the executors of the standard library, what `close` cancels is also
    reported to those who wait for it with `concurrent.futures.wait`.

    Parameters
    ----------
    count : int
        Threads, at most.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._open = True

    def submit(self, call: Callable[..., dict[str, Any]], *arguments: Any) -> Future[dict[str, Any]]:
        """Call ``call(*arguments)`` in one of the threads.

        Raises
        ------
        XpuRuntimeError
            After `close`.
        """
        job = _Job(call, arguments)
        with self._changed:
            if not self._open:
                raise XpuRuntimeError("this session is closed; open a new InferenceSession")
            self._waiting.append(job)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < self._count:
                self._threads += 1
                threading.Thread(target=self._work, name="xpuruntime-run").start()
        return job.future

    def close(self) -> None:
        """Cancel what has not begun. What runs finishes."""
        with self._changed:
            self._open = False
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for job in waiting:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()

    def _next(self) -> _Job | None:
        with self._changed:
            if not self._waiting:
                self._idle += 1
                self._changed.wait_for(lambda: bool(self._waiting) or not self._open, LINGER)
                self._idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    answer = job.call(*job.arguments)
                except BaseException as error:
                    job.future.set_exception(error)
                    del error
                else:
                    job.future.set_result(answer)
                    del answer
            del job
