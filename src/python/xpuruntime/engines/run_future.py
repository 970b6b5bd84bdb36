# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RunFuture`: the future of an asynchronous run, safe to wait for under `KeyboardInterrupt` and across a fork."""

from __future__ import annotations

import threading
from concurrent.futures import Future, TimeoutError
from typing import Any

from xpuruntime.errors import EngineError
from xpuruntime.runtime.interruptible_waits import LockedInOneStep

__all__ = ["RunFuture", "cancel", "lost_in_fork"]


class RunFuture(Future[dict[str, Any]]):
    """A future of a run, for which a program may wait and be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = LockedInOneStep()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the result, or raise what the run has raised; see `concurrent.futures.Future.result`."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the run has raised, if anything; see `concurrent.futures.Future.exception`."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        waiter = threading.Lock()  # of this call alone, so that an interruption leaves nothing taken
        waiter.acquire()

        def wake(_: Any) -> None:
            waiter.release()

        self.add_done_callback(wake)
        if not waiter.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))):
            with self._condition:
                callbacks: list[Any] = vars(self)["_done_callbacks"]
                if wake in callbacks:
                    callbacks.remove(wake)
            if not self.done():
                raise TimeoutError

    def lose(self) -> None:
        """In a child of a fork: say that nobody there will have the result."""
        self._condition = LockedInOneStep()
        if not self.done():
            self.set_exception(lost_in_fork())


def lost_in_fork() -> EngineError:
    """Return the error of a run that a fork has cut off from its threads."""
    return EngineError(
        "this run was started before the process was forked, and the threads that run it are in the parent. "
        "Fix: start it again in this process"
    )


def cancel(future: Future[Any]) -> None:
    """Cancel what has not begun, and report that to those who wait with `concurrent.futures.wait`, too."""
    if future.cancel():
        future.set_running_or_notify_cancel()
