# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interrupts of the command: Ctrl-C ends it with 130 and no traceback, also while it is imported and while it ends.

SIGTERM and SIGHUP end it in the same order, and then by the signal.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from xpuruntime.cli.exit_codes import ExitCode


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


#: Seconds in which a signal that comes again is the same: `timeout` sends it to the process, and to its group.
_SAME = 0.5
#: Seconds that native code may take until the signal is seen, and until the second one ends the process without that.
_UNSEEN, _AGAIN = 10.0, 0.2
#: Seconds until a signal comes again that was swallowed.
_REPEAT = 0.05


class _Terminated(KeyboardInterrupt):
    """A signal came that ends the process."""


class Terminations:
    """The handlers of SIGTERM and SIGHUP in a process that is the command.

    The first signal raises KeyboardInterrupt, so that what is open is closed, and the process ends by it when all that
    is done at exit was done. The second ends the process at once. Native code in which Python sees no signals is not
    waited for without end. A signal that is ignored, as `nohup` has it, or that has a handler is left alone; so are all
    outside of the main thread.
    """

    def __init__(self) -> None:
        #: The signal that came first, if any.
        self.number: int | None = None
        #: When the first one came, and when it was handled.
        self._sent = self._handled = 0.0
        self._process = os.getpid()
        here = os.name == "posix" and threading.current_thread() is threading.main_thread()
        names = (signal.SIGTERM, signal.SIGHUP) if here else ()
        self._watched = [name for name in names if signal.getsignal(name) is signal.SIG_DFL]
        if self._watched:
            atexit.register(self._end)  # called last, since nothing is registered before
            os.register_at_fork(after_in_child=self._leave)

    def raise_once(self) -> None:
        """From now on: raise KeyboardInterrupt for the first signal."""
        if not self._watched:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), name="terminations", daemon=True).start()
        repeat_lost(_Terminated, self._repeat)
        for signal_number in self._watched:
            signal.signal(signal_number, self._raise)

    def let_finish(self) -> None:
        """From now on: let what is cleaned up at exit finish, but once: a second signal ends the process."""
        for signal_number in self._watched:
            if self._has(signal_number):
                signal.signal(signal_number, self._count)

    def _has(self, number: int) -> bool:
        return number in self._watched and signal.getsignal(number) in (self._raise, self._count)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._count(number, frame)
        if self.number is None:
            self.number = number
            raise _Terminated(signal.Signals(number).name)

    def _count(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self._handled:
            self._handled = now
        elif now - self._handled >= _SAME:
            _kill(number)

    def _watch(self, reading: int) -> NoReturn:
        """End the process by the second signal also where native code keeps the first from being handled."""
        while True:
            for number in os.read(reading, 64):
                now = time.monotonic()
                if not self._has(number):
                    continue
                if not self._sent:
                    self._sent = now
                    threading.Thread(target=self._end_unseen, args=(number,), daemon=True).start()
                elif now - self._sent >= _SAME:
                    time.sleep(_AGAIN)
                    _exit(number)

    def _end_unseen(self, number: int) -> None:
        time.sleep(_UNSEEN)
        if not self._handled:
            _exit(number)

    def _repeat(self) -> None:
        number, self.number = self.number, None
        self._sent = self._handled = 0.0
        if number is not None:
            os.kill(self._process, number)

    def _leave(self) -> None:
        """Have a forked child end by the signals at once, and tell nothing of them to this process."""
        self.number = None
        if any(map(self._has, self._watched)):
            signal.set_wakeup_fd(-1)
        for signal_number in self._watched:
            if self._has(signal_number):
                signal.signal(signal_number, signal.SIG_DFL)

    def _end(self) -> None:
        if self.number is not None:
            _kill(self.number)


def repeat_lost(kind: type[KeyboardInterrupt], repeat: Callable[[], object]) -> None:
    """Have a signal come again whose exception was swallowed.

    Python drops what is raised while it destroys an object, and in callbacks of weak references, import locks and the
    garbage collector.
    """
    shown = sys.unraisablehook

    def later(hook_ends: threading.Event) -> None:
        hook_ends.wait()  # in the hook it would be dropped once more, with a traceback
        time.sleep(_REPEAT)
        repeat()

    def hook(unraisable: Any, /) -> None:
        if isinstance(unraisable.exc_value, kind) and threading.current_thread() is threading.main_thread():
            hook_ends = threading.Event()
            threading.Thread(target=later, args=(hook_ends,), daemon=True).start()
            hook_ends.set()
        else:
            shown(unraisable)

    sys.unraisablehook = hook


def _kill(number: int) -> None:
    _flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _exit(number: int) -> NoReturn:
    """End the process from another thread, with the status that a shell has for the signal."""
    _flush()
    os._exit(128 + number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it is closed, or in use by what was interrupted
            stream.flush()
