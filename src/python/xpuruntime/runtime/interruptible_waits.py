# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Latches, condition variables and background calls that a KeyboardInterrupt may end, and signal stacks of threads."""

from __future__ import annotations

import collections
import ctypes
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar

from xpuruntime import _core

_Result = TypeVar("_Result")
#: Seconds of one wait for a lock. A signal that comes as such a wait begins, or on Windows, does not end it.
LONGEST_WAIT = 0.1 if sys.platform == "win32" else 0.5


def uninterrupted(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function to its end; a Ctrl-C that comes meanwhile is handled after it. Not for what waits.

    So are other signals that end programs, or functions that take too long, by an exception of their handler.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    try:
        for number in _DEFERRED:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        return function(*arguments)
    finally:
        known = dict(handlers)
        _put_back(handlers)
        _call_each([functools.partial(known[number], number, frame) for number, frame in came])


def _call_each(handlers: list[Callable[[], object]]) -> None:
    """Call handlers in order, each of them whatever those before it raise."""
    if handlers:
        try:
            handlers[0]()
        finally:
            _call_each(handlers[1:])


#: Signals whose handlers are known to raise: of Ctrl-C, of time limits, and of whoever ends a service.
_DEFERRED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGALRM", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)


def _restore(handlers: dict[int, Any]) -> None:
    while handlers:
        number = next(iter(handlers))
        signal.signal(number, handlers[number])
        del handlers[number]


#: It is begun anew where a handler that stands again interrupts it.
_put_back = _core.guarded(_restore, _restore)


class Latch:
    """An event that stays set. A handler of signals may set it, also while its own thread waits for it."""

    def __init__(self) -> None:
        self._set = False
        #: A taken lock of each call that waits.
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def set(self) -> None:
        """Have all go on that wait. Where this was interrupted, some may still wait until it is called again."""
        self._set = True
        for waiter in list(self._waiting):
            try:
                waiter.release()
            except RuntimeError:  # by another call
                continue

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for so many seconds; return whether it is set."""
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiting.append(waiter)
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._set:
                left = LONGEST_WAIT if end is None else min(LONGEST_WAIT, end - time.monotonic())
                if left <= 0:
                    break
                waiter.acquire(timeout=left)
        finally:
            self._waiting.remove(waiter)
        return self._set


class ConditionVariable:
    """A condition variable over a plain lock, which waiters do not hold."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiting: list[Latch] = []

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, or for so many seconds; return whether it holds. Without the lock."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            latch = Latch()
            with self._lock:
                if condition():
                    return True
                self._waiting.append(latch)
            if not latch.wait(None if end is None else end - time.monotonic()):
                with self._lock:
                    return bool(condition())

    def notify_all(self) -> None:
        """Have all who wait look again. With the lock."""
        for latch in self._waiting:
            latch.set()
        self._waiting.clear()


class BackgroundCall(Generic[_Result]):
    """A call in a daemon thread of its own, which goes on where the wait for it is interrupted."""

    def __init__(self, call: Callable[[], _Result], name: str) -> None:
        self._call: Callable[[], _Result] | None = call
        self._results: list[_Result] = []
        self.error: BaseException | None = None
        self.done = Latch()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        uninterrupted(self.thread.start)

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._results.append(call())
        except BaseException as error:  # raised where it is waited for
            self.error = error
        finally:
            del call
            self.done.set()

    def result(self) -> _Result:
        """Wait for its end, and return what it returned, or raise what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self._results[0]


#: A thread without such a stack says so by this flag, and by it again it is left without one.
_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    """`stack_t` of Linux: see sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@functools.lru_cache(maxsize=1)
def _sigaltstack() -> Any:
    call = ctypes.CDLL(None, use_errno=True).sigaltstack
    call.argtypes = [ctypes.POINTER(_Stack), ctypes.POINTER(_Stack)]
    return call


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Give this thread, at the end, the alternate signal stack that it had.

    Each CPU plugin of OpenVINO (one an `openvino.Core`) gives the thread that loads it an alternate signal stack, and
    unmaps that stack where it is destroyed: in whichever thread, and in whichever order. The first thread is then left
    with a stack that is missing, and the next signal that Python handles in it (Ctrl-C, an alarm, the end of a worker
    of a `DataLoader`) ends the process without a word. A stack that no thread uses is unmapped without harm.

    On other systems than Linux there is nothing to keep.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack, had = _sigaltstack(), _Stack()
    known = sigaltstack(None, ctypes.byref(had)) == 0
    try:
        yield
    finally:
        if known:
            had.flags &= _SS_DISABLE
            sigaltstack(ctypes.byref(had), None)
