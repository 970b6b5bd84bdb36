# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RunFuture`: the future of an asynchronous run, safe to wait for under `KeyboardInterrupt` and across a fork."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError
from xpuruntime.runtime.interruptible_waits import InterruptibleFuture

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["RunFuture", "cancel", "lost_in_fork"]


class RunFuture(InterruptibleFuture[dict[str, Any]]):
    """A future of a run, for which a program may wait and be interrupted."""

    def lose(self) -> None:
        """In a child of a fork: say that nobody there will have the result."""
        self.begin_anew()
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
