# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interrupts of the command: Ctrl-C ends it with 130 and no traceback, also while it is imported and while it ends.

SIGTERM and SIGHUP end it in the same order, and then by the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from xpuruntime.cli.exit_codes import ExitCode
from xpuruntime.cli.terminations import Terminations, repeat_lost

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Interrupts"]


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed."""


class Interrupts:
    """The handler of SIGINT in a process that is the command; does nothing where the signal is ignored.

    Imports turn a KeyboardInterrupt into other errors, so that none is raised in those of the command itself; and what
    follows one that was raised is no error of its own.
    """

    def __init__(self) -> None:
        self._happened = False
        self._terminations = Terminations()
        here = threading.current_thread() is threading.main_thread()
        self._active = here and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)

    @property
    def happened(self) -> bool:
        """Whether a signal was raised in the command."""
        return self._happened or self._terminations.number is not None

    def end_process(self) -> None:
        """From now on: end the process, which has done nothing yet."""
        self._handle(_end)

    def raise_once(self) -> None:
        """From now on: raise KeyboardInterrupt, as Python does."""
        self._handle(self._raise)
        if self._active:
            repeat_lost(_Interrupted, _interrupt)
        self._terminations.raise_once()

    def let_finish(self) -> None:
        """From now on: let what is cleaned up at exit finish, but once: a second signal ends the process."""
        self._handle(self._forgive)
        self._terminations.let_finish()

    def _handle(self, handler: Callable[[int, Any], None]) -> None:
        if self._active:
            signal.signal(signal.SIGINT, handler)

    def _raise(self, number: int, frame: Any) -> NoReturn:
        del number, frame
        self._happened = True
        raise _Interrupted

    def _forgive(self, number: int, frame: Any) -> None:
        del number, frame
        self._handle(_end)


def _interrupt() -> None:
    if os.name == "posix":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


def _end(number: int, frame: Any) -> None:
    del number, frame
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):  # it is closed, or in use by what was interrupted
            continue
    os._exit(ExitCode.INTERRUPTED)
