# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Slow calls of the vendor, made so that Ctrl-C ends them.

A library that calls back into Python while the main thread waits in it would have to pass a KeyboardInterrupt through
C++ frames, which ends the process. So such calls are made on a thread of their own, and the caller waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime.runtime.interruptible_waits import BackgroundCall

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cancel", "interruptible"]

_Result = TypeVar("_Result")


class Cancel:
    """Whether work in the background is still wanted."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        """Say that it is not."""
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether somebody said so."""
        return self._asked

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


def interruptible(work: Callable[[], _Result], cancel: Cancel) -> _Result:
    """Return what `work` returns, or raise what it raises.

    An exception that arrives while the caller waits, such as a KeyboardInterrupt, sets `cancel`, waits for the work to
    end, and goes on. A second one does not wait.
    """
    call = BackgroundCall(work, "xpuruntime-tensorrt")
    try:
        return call.result()
    except BaseException:
        cancel.set()
        call.done.wait()
        raise
