# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Slow calls of the vendor, made so that Ctrl-C ends them.

A library that calls back into Python while the main thread waits in it would have to pass a KeyboardInterrupt through
C++ frames, which ends the process. So such calls are made on a thread of their own, and the caller waits for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cancel", "interruptible"]

_Result = TypeVar("_Result")
_POLL = 0.1


class Cancel:
    """Whether work in the background is still wanted."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Say that it is not."""
        self._event.set()

    @property
    def asked(self) -> bool:
        """Whether somebody said so."""
        return self._event.is_set()

    def monitor(self, trt: Any) -> Any:
        """Return a progress monitor that ends a build when it is cancelled."""
        base: Any = trt.IProgressMonitor
        cancel = self

        class Monitor(base):  # type: ignore[misc]
            def __init__(self) -> None:
                base.__init__(self)

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                del phase_name, parent_phase, num_steps

            def phase_finish(self, phase_name: str) -> None:
                del phase_name

            def step_complete(self, phase_name: str, step: int) -> bool:
                del phase_name, step
                return not cancel.asked

        return Monitor()


class _Work(Generic[_Result]):
    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._result: list[_Result] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self.done.set()

    def answer(self) -> _Result:
        if self._error is not None:
            raise self._error
        return self._result[0]


def interruptible(work: Callable[[], _Result], cancel: Cancel) -> _Result:
    """Return what `work` returns, or raise what it raises.

    An exception that arrives while the caller waits, such as a KeyboardInterrupt, sets `cancel`, waits for the work to
    end, and goes on. A second one does not wait.

    Parameters
    ----------
    work : callable
    cancel : Cancel
    """
    box = _Work(work)
    threading.Thread(target=box.run, name="xpuruntime-tensorrt", daemon=True).start()
    try:
        while not box.done.wait(_POLL):
            pass
    except BaseException:
        cancel.set()
        while not box.done.wait(_POLL):
            pass
        raise
    return box.answer()
