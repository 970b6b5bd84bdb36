# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Batcher`: drives the scheduler of one model with threads, and runs what it dispatches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from xpuruntime.engines.run_threads import InterruptibleFuture
from xpuruntime.runtime.interruptible_waits import ConditionVariable, Latch, uninterrupted
from xpuruntime.serving.batching.execution import BatchExecutor, ShortRuns
from xpuruntime.serving.batching.requests import Admission, Execution, Job, QueueState, fail
from xpuruntime.serving.batching.scheduler import Dispatch, Entry, EntryRows, QueueFull, Scheduler
from xpuruntime.serving.messages import ServingError, Status

if TYPE_CHECKING:
    from concurrent.futures import Future

    from xpuruntime.engines.host_model import HostRunner
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.messages import InferRequest, InferResponse

#: The instance that a request runs on which is not queued.
_INLINE = -1
#: Seconds of one wait of a thread; a deadline may be further away than a lock can wait.
_LONGEST_WAIT = 3600.0


class Observer(Protocol):
    """Callbacks of a batcher, called in its threads without its lock."""

    def executed(self, execution: Execution) -> None:
        """Take one execution."""

    def answered(self, job: Job, now: float) -> None:
        """Take a request with an outcome, and set its future. Called once for each request that was queued."""

    def outcome(self, job: Job, now: float) -> InferResponse | ServingError:
        """Take a request with an outcome that was not queued, and return its response or error."""


class Batcher:
    """Queues the requests of a model and runs them in batches, once it was started."""

    def __init__(
        self,
        runner: HostRunner,
        layout: Layout,
        settings: BatchSettings,
        observer: Observer,
        *,
        instances: int = 1,
        name: str = "model",
        warm: Sequence[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
        inline: bool = False,
        others: Sequence[HostRunner] = (),
    ) -> None:
        self._observer, self._name, self._clock = observer, name, clock
        #: One for each device; each has `instances` threads.
        self._runners = (runner, *others)
        threads = instances * len(self._runners)
        self._settings, self._most = settings, max(settings.max_batch_size, 1)
        #: Times by shape, where requests may run inline.
        self.short = ShortRuns.of(settings) if inline else None
        self._admission = Admission(layout, settings, name, clock)
        self._executors = [BatchExecutor(runner, layout, settings, name, self.short) for runner in self._runners]
        self._scheduler = Scheduler(settings, threads, serial=runner.serial and not others)
        self._lock = threading.Lock()
        #: Of the threads of the batcher, which nothing interrupts; and of those that call it.
        self._work = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._settled = ConditionVariable(self._lock)
        self._closed = False
        self._watching = False
        self._busy: dict[int, float] = {}
        #: Why a thread has ended although the batcher is open; empty where none has.
        self.broken = ""
        #: Answers that are on the way out of the threads.
        self._answering = 0
        self._warm, self._cold = warm, threads
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = [
            threading.Thread(target=self._guarded, args=(index,), name=f"xpuruntime-serve-{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        self._ends = [Latch() for _ in self._threads]

    def start(self) -> None:
        """Serve. Raises what a run of `warm` raises; the batcher is to be closed then, as after an interruption."""
        uninterrupted(self._start_threads)
        if self._warm:
            self._settled.wait_for(lambda: not self._cold)
            self._warm = ()
            if self._failure is not None:
                raise self._failure

    def _start_threads(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, request: InferRequest) -> Future[InferResponse]:
        """Queue a request; from the main thread, which signals reach, by way of another one."""
        return uninterrupted(self._queue, self._admission.accept(request))

    def respond(self, request: InferRequest) -> InferResponse | ServingError | Future[InferResponse]:
        """Run a request at once where it is known to be short and nothing waits, else queue it."""
        job = self._admission.accept(request)
        short, scheduler = self.short, self._scheduler
        if short is None or scheduler.running or scheduler.waiting or job.entry.rows > self._most:
            return self._queue(job)
        if not short.allow(job.feed.shapes, job.entry.arrived):
            return self._queue(job)
        with self._lock:
            alone = not self._closed and scheduler.begin_alone()
            if alone:
                self._busy[_INLINE] = job.entry.arrived
        return self._run_inline(job, short) if alone else self._queue(job)

    def _run_inline(self, job: Job, short: ShortRuns) -> InferResponse | ServingError:
        entry = job.entry
        began = entry.arrived
        try:
            batch = Dispatch((EntryRows(entry, 0, entry.rows),), entry.rows, "inline", began)
            execution = self._executors[0].execute(batch, [job], began)
            self._observer.executed(execution)
            now = self._clock()
            short.ran(now - began, now)
            if execution.error is not None:
                entry.outcome, entry.error = "failed", execution.error
            elif entry.deadline is not None and entry.deadline <= now:
                entry.outcome = "expired"
            else:
                entry.outcome = "done"
            return self._observer.outcome(job, now)
        finally:
            entry.payload = None
            with self._lock:
                del self._busy[_INLINE]
                scheduler = self._scheduler
                scheduler.end_alone()
                if scheduler.waiting:
                    self._work.notify()
                if scheduler.draining and self._is_empty():
                    self._settled.notify_all()

    def _ended(self, index: int, batch: Dispatch, execution: Execution, now: float) -> list[Entry]:
        """Take the end of a batch, and return the entries that have an answer now. As `_taken`."""
        self._busy.pop(index, None)
        self._scheduler.complete(batch, now, execution.error, preparation=1e-9 * execution.input_ns)
        self._scheduler.expire(now)
        return self._taken()

    def _queue(self, job: Job) -> Future[InferResponse]:
        entry = job.entry
        job.future = InterruptibleFuture()
        with self._lock:
            if self._closed:
                raise self._unloading()
            try:
                self._scheduler.submit(entry)
            except QueueFull as full:
                if not full.retry_after:
                    raise self._unloading() from None
                raise ServingError(
                    Status.RESOURCE_EXHAUSTED,
                    f"the queue of model {self._name!r} is full: {self._settings.max_queue_size} requests wait. "
                    f"Fix: retry after {full.retry_after:.3f} s, or raise batching.max_queue_size",
                    retry_after=full.retry_after,
                ) from None
            if self._scheduler.idle:
                self._work.notify()
            if entry.deadline is not None or entry.overdue is not None:
                self._watch()
        job.future.add_done_callback(lambda future: self._cancel(entry) if future.cancelled() else None)
        return job.future

    def probe(self, feeds: Mapping[str, Any]) -> None:
        """Run inputs that were good before, as a batch would, on each device. Raises what that raises."""
        for executor in self._executors:
            executor.probe(feeds)

    def state(self) -> QueueState:
        """Return what the batcher does now."""
        with self._lock:
            now = self._clock()
            scheduler = self._scheduler
            oldest = scheduler.oldest()
            first = scheduler.next_deadline()
            return QueueState(
                scheduler.waiting,
                scheduler.running,
                now - oldest.arrived if oldest is not None else 0.0,
                first - now if first is not None else None,
                max((now - began for began in self._busy.values()), default=0.0),
            )

    @property
    def unanswered(self) -> int:
        """How many requests have no answer yet."""
        with self._lock:
            return self._scheduler.unanswered + self._answering

    def drain(self, timeout: float | None = None) -> bool:
        """Take no request any more, and wait until all that were accepted have an answer; return whether they have."""
        uninterrupted(self._begin_to_drain)
        return self._settled.wait_for(self._is_empty, timeout)

    def _begin_to_drain(self) -> None:
        with self._lock:
            self._scheduler.drain()
            self._work.notify_all()

    def close(self, timeout: float = 10.0) -> bool:
        """Fail what has no answer, end the threads, and return whether they have ended: one may be inside of a model.

        Drain before, so that nothing has to fail.
        """
        uninterrupted(self._fail_all)
        until = time.monotonic() + timeout
        ended = [
            end.wait(max(0.0, until - time.monotonic()))
            for thread, end in zip(self._threads, self._ends, strict=True)
            if thread.ident is not None and thread is not threading.current_thread()
        ]
        return self._settled.wait_for(lambda: not self._scheduler.alone, until - time.monotonic()) and all(ended)

    def _fail_all(self) -> None:
        with self._lock:
            left = self._give_up()
        for entry in left:
            if entry.outcome == "cancelled":
                entry.outcome, entry.error = "failed", self._unloading()
        self._answer(left)

    def _give_up(self) -> list[Entry]:
        """Close the queue, and return what has no answer. With the lock; answers of it must follow without it."""
        self._closed = True
        self._scheduler.drain()
        left = self._scheduler.unsettled()
        for entry in left:
            self._scheduler.cancel(entry)
        freed = [ready for ready in self._scheduler.take_ready() if ready.outcome != "cancelled"]
        self._answering += len(left) + len(freed)
        self._work.notify_all()
        self._timer.notify_all()
        return left + freed

    def _guarded(self, index: int) -> None:
        """Serve; an error of the batcher itself fails what has no answer, since nobody would give one."""
        try:
            if self._warmed(index):
                self._failing_all(lambda: self._serve(index))
        finally:
            self._ends[index].set()

    def _failing_all(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            with self._lock:
                self.broken = f"{type(error).__name__}: {error}"
                left = self._give_up()
            failure = ServingError(Status.INTERNAL, f"model {self._name!r}: its batcher has ended: {self.broken}")
            for entry in left:
                if entry.outcome == "cancelled":
                    entry.outcome, entry.error = "failed", failure
            with contextlib.suppress(Exception):
                self._answer(left)
            for entry in left:
                if entry.payload is not None:
                    fail(entry.payload.future, failure)
            raise

    def _warmed(self, index: int) -> bool:
        failure: BaseException | None = None
        try:
            for feeds in self._warm:
                self._runners[index % len(self._runners)].run(dict(feeds))
        except BaseException as error:
            failure = error
        with self._lock:
            self._cold -= 1
            self._failure = self._failure or failure
            self._settled.notify_all()
        return failure is None

    def _unloading(self) -> ServingError:
        return ServingError(Status.UNAVAILABLE, f"model {self._name!r} is being unloaded. Fix: retry", retry_after=1.0)

    def _cancel(self, entry: Entry) -> None:
        uninterrupted(self._drop, entry)

    def _drop(self, entry: Entry) -> None:
        with self._lock:
            self._scheduler.cancel(entry)
            ready = self._taken()
        self._answer(ready)

    def _is_empty(self) -> bool:
        return not (self._scheduler.unanswered or self._answering)

    def _watch(self) -> None:
        """Have a thread expire requests also while all instances are busy. With the lock."""
        if self._watching:
            self._timer.notify()
            return
        self._watching = True
        name = f"xpuruntime-serve-{self._name}-timer"
        threading.Thread(target=self._failing_all, args=(self._expire,), name=name, daemon=True).start()

    def _expire(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = self._clock()
                self._scheduler.expire(now)
                ready = self._taken()
                if not ready:
                    first = self._scheduler.next_expiry()
                    self._timer.wait(None if first is None else _within_bounds(first - now))
            self._answer(ready)

    def _taken(self) -> list[Entry]:
        """Return the entries that have an answer now. With the lock; `_answer` must follow without it."""
        ready = self._scheduler.take_ready()
        self._answering += len(ready)
        if not ready and self._is_empty():
            self._settled.notify_all()
        return ready

    def _answer(self, ready: list[Entry]) -> None:
        if not ready:
            return
        now = self._clock()
        for entry in ready:
            self._observer.answered(entry.payload, now)
            entry.payload = None  # breaks the cycle with its job, so that tensors are freed without a collection
        with self._lock:
            self._answering -= len(ready)
            if self._is_empty():
                self._settled.notify_all()

    def _serve(self, index: int) -> None:
        executor_index = index % len(self._executors)
        batch: Dispatch | None = None
        jobs: list[Job] = []
        execution: Execution | None = None
        while True:
            with self._lock:
                now = self._clock()
                if batch is not None:
                    assert execution is not None
                    ready = self._ended(index, batch, execution, now)
                    batch = None
                else:
                    self._scheduler.expire(now)
                    ready = self._taken()
                if not ready:
                    if self._closed:
                        return
                    batch = self._scheduler.dispatch(now)
                    if batch is None:
                        at = self._scheduler.next_dispatch()
                        self._work.wait(None if at is None else _within_bounds(at - now))
                        continue
                    self._busy[index] = now
                    jobs = [part.entry.payload for part in batch.parts]  # one that expires meanwhile loses its own
                    if self._scheduler.idle and self._scheduler.waiting:
                        self._work.notify()
            self._answer(ready)
            if batch is not None:
                execution = self._executors[executor_index].execute(batch, jobs, now)
                execution.place = executor_index
                jobs = []
                self._observer.executed(execution)


def _within_bounds(seconds: float) -> float:
    return min(max(0.0, seconds), _LONGEST_WAIT)
