# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RunThreads`: the few threads that run a model asynchronously where its engine has no requests of its own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, TimeoutError
from typing import Any, NamedTuple, TypeVar, cast

from xpuruntime.errors import DeadlineError, EngineError, QueueFullError, XpuRuntimeError
from xpuruntime.runtime.interruptible_waits import LONGEST_WAIT, Latch, uninterrupted
from xpuruntime.runtime.session_registry import interpreter_ends, reset_in_child

_Result = TypeVar("_Result")
#: Seconds that a thread stays when there is nothing to do.
LINGER = 0.25


class QueueLimits(NamedTuple):
    """How many calls may wait when one more is submitted, and seconds within which it must begin."""

    queue: int | None = None
    timeout: float | None = None


class _Job:
    def __init__(self, call: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
        self.call, self.arguments = call, arguments
        self.future: InterruptibleFuture[dict[str, Any]] = InterruptibleFuture()
        self.expired = False


class RunThreads:
    """Runs calls in the order in which they came, a few at a time.

    Threads start when there is work and end soon after there is none, so that nothing has to be stopped, and nothing
    but the work keeps the model alive. Unlike the executors of the standard library, what `close` cancels is also
    reported to those who wait for it with `concurrent.futures.wait`, and an interruption of whoever submits or waits
    leaves the queue as it was.

    In a child of a fork, calls that were accepted before have no result.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._open = True
        self._begin()
        reset_in_child(self)

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        #: Threads that are inside of a call; notified when they become less.
        self._calling: set[int] = set()
        self._less = threading.Condition(self._lock)
        #: Calls that must begin by a time, and what waits for the first of them.
        self._deadlines: list[tuple[float, int, weakref.ref[_Job]]] = []
        self._numbers = itertools.count()
        self._earlier = threading.Condition(self._lock)
        self._watching = False

    @property
    def closed(self) -> bool:
        """Whether nothing is accepted any more."""
        return not self._open

    def submit(
        self, call: Callable[..., dict[str, Any]], *arguments: Any, limits: QueueLimits | None = None
    ) -> Future[dict[str, Any]]:
        """Call ``call(*arguments)`` in one of the threads."""
        if not self._open:
            raise XpuRuntimeError("this session is closed; open a new InferenceSession")
        if interpreter_ends():
            raise XpuRuntimeError("the interpreter ends, so no run is started any more; wait for runs before it does")
        job = _Job(call, arguments)
        if limits is not None and limits.queue is not None:
            self._check_room(limits.queue)
        self._jobs.put(job)
        if limits is not None and limits.timeout is not None:
            uninterrupted(self._watch, job, time.monotonic() + limits.timeout)
        if self._lacks_threads():
            uninterrupted(self._grow)
        if not self._open:  # closed meanwhile
            uninterrupted(self._cancel_waiting)
        return job.future

    def close(self) -> None:
        """Cancel what has not begun, and wait for what has."""
        self._open = False
        uninterrupted(self._cancel_waiting)
        self._wait_for_calls(threading.get_ident())

    def in_child(self) -> None:
        """Have `close` wait for no thread of the parent; see `xpuruntime.runtime.session_registry`."""
        self._begin()

    def _wait_for_calls(self, caller: int) -> None:
        with self._lock:
            while not self._less.wait_for(lambda: not self._calling - {caller}, LONGEST_WAIT):
                continue

    def _check_room(self, most: int) -> None:
        if self._jobs.qsize() < most:
            return
        uninterrupted(self._drop_cancelled)
        if self._jobs.qsize() >= most:
            raise QueueFullError(
                f"{most} asynchronous runs of this session wait already. Fix: wait for one of them, or allow more with "
                "queue="
            )

    def _drop_cancelled(self) -> None:
        kept = []
        with contextlib.suppress(queue.Empty):
            while True:
                kept.append(self._jobs.get_nowait())
        for job in kept:
            if job is None or not job.future.done():
                self._jobs.put(job)
            elif job.future.cancelled():
                job.future.set_running_or_notify_cancel()

    def _watch(self, job: _Job, deadline: float) -> None:
        """Have a call fail that has not begun by a time. Never in a thread that may be interrupted."""
        with self._lock:
            heapq.heappush(self._deadlines, (deadline, next(self._numbers), weakref.ref(job)))
            self._earlier.notify()
            if self._watching:
                return
            self._watching = True
        try:
            threading.Thread(target=self._expire, name="xpuruntime-run-timer", daemon=True).start()
        except BaseException:
            with self._lock:
                self._watching = False
            raise

    def _expire(self) -> None:
        while True:
            with self._lock:
                job = self._first_to_expire()
                if job is None and not self._deadlines:
                    self._watching = False
                    return
                left = self._deadlines[0][0] - time.monotonic()
                if job is None or left > 0:
                    del job  # whose call keeps the model alive
                    self._earlier.wait(min(left, LINGER))
                    continue
                heapq.heappop(self._deadlines)
                job.expired = True  # so that no thread begins it
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                job.future.set_exception(
                    DeadlineError(
                        "this asynchronous run did not begin within its timeout, because others ran. Fix: allow more "
                        "time, or start fewer runs"
                    )
                )
            del job

    def _first_to_expire(self) -> _Job | None:
        """Return the call with the first deadline of those that have not begun. With the lock."""
        while self._deadlines:
            job = self._deadlines[0][2]()
            if job is not None and not job.future.done() and not job.future.running():
                return job
            heapq.heappop(self._deadlines)
        return None

    def _lacks_threads(self) -> bool:
        # Without the lock: a thread that ends says so before it looks for jobs a last time.
        return self._jobs.qsize() > self._idle and self._threads < self._count

    def _grow(self) -> None:
        """Start one more thread where that is needed. Never in a thread that may be interrupted."""
        with self._lock:
            if self._jobs.qsize() <= self._idle or self._threads >= self._count:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="xpuruntime-run", daemon=False).start()
        except BaseException:
            with self._lock:
                self._threads -= 1
            raise

    def _cancel_waiting(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                cancel(job.future)
        with self._lock:
            idle = self._idle
        for _ in range(idle):
            self._jobs.put(None)

    def _next(self) -> _Job | None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                job = self._wait()
            if job is not None:
                if self._lacks_threads():  # it was taken for one that is idle
                    self._grow()
                return job
            with self._lock:
                self._threads -= 1
                if not self._jobs.qsize():
                    return None
                self._threads += 1

    def _wait(self) -> _Job | None:
        with self._lock:
            self._idle += 1
        try:
            return self._jobs.get(timeout=LINGER)
        except queue.Empty:
            return None
        finally:
            with self._lock:
                self._idle -= 1

    def _work(self) -> None:
        me = threading.get_ident()
        while (job := self._next()) is not None:
            if self._may_begin(job, me):
                answer: dict[str, Any] | None = None
                failure: BaseException | None = None
                try:
                    answer = job.call(*job.arguments)
                except BaseException as error:
                    failure = error
                with self._lock:  # before the future is done, whose callbacks may close
                    self._calling.discard(me)
                    self._less.notify_all()
                if failure is None:
                    job.future.set_result(cast("dict[str, Any]", answer))
                else:
                    job.future.set_exception(failure)
                del answer, failure
            del job

    def _may_begin(self, job: _Job, me: int) -> bool:
        """Say whether a call is to be made, which `close` waits for from then on; or cancel it."""
        with self._lock:
            if job.expired:
                return False
            if self._open:
                if not job.future.set_running_or_notify_cancel():
                    return False
                self._calling.add(me)
                return True
        cancel(job.future)  # whose callbacks may do anything
        return False


class InterruptibleFuture(Future[_Result]):
    """A future whose wait can be interrupted; in a forked child it has no result, and says so at once."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()
        #: Set before any other callback. Who waits takes no lock of the future, which an interruption might not give
        #: back: the thread that runs the call would wait for it for ever.
        self._latch = latch = Latch()
        self.add_done_callback(lambda _: latch.set())

    def result(self, timeout: float | None = None) -> _Result:
        """Return the result, or raise what the call has raised; see `concurrent.futures.Future.result`."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the call has raised, if anything; see `concurrent.futures.Future.exception`."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if self._latch.is_set():
            return
        if self._process != os.getpid():  # before any lock, which a thread of the parent may have held
            raise EngineError(
                "this run was started before the process was forked, and its result is the parent's. "
                "Fix: start it again in this process"
            )
        if not self._latch.wait(timeout):
            raise TimeoutError


def cancel(future: Future[Any]) -> None:
    """Cancel what has not begun, and report that to those who wait with `concurrent.futures.wait`, too."""
    if future.cancel():
        future.set_running_or_notify_cancel()
