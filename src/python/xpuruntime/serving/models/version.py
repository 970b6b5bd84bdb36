# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ServedVersion`: one version of a model with its session, its batcher, and what was measured of it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.inference.calls import host_runner
from xpuruntime.runtime.cpu_and_memory import process_memory
from xpuruntime.serving.batching.driver import Batcher
from xpuruntime.serving.batching.execution import joined
from xpuruntime.serving.batching.layout import Layout, sized_by_values
from xpuruntime.serving.batching.requests import answer, fail
from xpuruntime.serving.batching.settings import batch_sizes
from xpuruntime.serving.messages import InferResponse, ServingError, Status
from xpuruntime.serving.models.loading import (
    batch_feeds,
    choose_limits,
    curve_of,
    locked_size,
    open_session,
    size_on_disk,
    warmup_sizes,
)
from xpuruntime.serving.monitoring.records import Failure, ModelStatistics
from xpuruntime.serving.watchers import make_watchers

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.serving.batching.requests import Execution, Job
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.messages import Parameter
    from xpuruntime.serving.models.loading import Limits
    from xpuruntime.serving.models.model_settings import ModelSettings
    from xpuruntime.serving.monitoring.records import RequestLog
    from xpuruntime.serving.watchers import Watcher

#: Seconds past its deadline after which a request in the queue means that the model makes no progress.
_LATE = 1.0
#: Under a memory budget, each so many executions the growth of the process is looked at, which may be so many bytes.
_LOOKED_AT, _GROWN = 8, 64 << 20
#: Failed executions in a row after which inputs that ran before decide whether the model is ready.
_MOST_FAILED = 8
#: Refusals that no version is to blame for: the request is asked of another one, or its client has no token.
_NOT_COUNTED = (Status.UNAVAILABLE, Status.UNAUTHENTICATED)


class ServedVersion:
    """One version of a model, loaded and warmed up; it serves once it was started."""

    def __init__(
        self,
        name: str,
        version: int,
        path: str,
        settings: ModelSettings,
        *,
        registry: EngineRegistry | None = None,
        session: InferenceSession | None = None,
        log: RequestLog | None = None,
        device: str | None = None,
    ) -> None:
        self.name, self.version, self.path, self.settings = name, version, path, settings
        self.statistics = ModelStatistics()
        self.limits: Limits | None = None
        self.warmed: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self._log, self._own = log, session is None
        before = _memory_taken(device)
        first, *others = settings.devices or (None,)
        self.session = open_session(path, settings, registry, first) if session is None else session
        #: One for each device, the first is `session`; and their executions and rows.
        self.sessions = [self.session]
        self.ran: list[tuple[int, int]] = [(0, 0)]
        self._counting = threading.Lock()
        self._watchers: list[Watcher] = []
        #: Executions that failed since the last good one, and why the model is not ready for that.
        self._failed_runs, self._failing = 0, ""
        #: The smallest inputs that ran at the warm-up.
        self._probe: dict[str, Any] | None = None
        try:
            self.layout = Layout.of(
                self.session.inputs,
                self.session.outputs,
                settings.batching,
                optional=self.session.model.overridable_inputs,
            )
            for other in others:
                self.sessions.append(open_session(path, settings, registry, other))
                self.ran.append((0, 0))
            self.runner, *other_runners = (host_runner(session) for session in self.sessions)
            self._warm_up()
            if settings.evidence:
                self.reports = [session.explain().to_dict() for session in self.sessions]
            self._watchers = make_watchers(path, settings, self.session, self.layout, registry)
            batching = settings.batching
            if self.limits is not None:
                batching = batching.replace(
                    max_batch_size=self.limits.max_batch_size, max_queue_delay_us=self.limits.max_queue_delay_us
                )
            #: The settings in force.
            self.batching = batching
            warm = self._begin_with(batching) if self.runner.copies_all and settings.warmup != "none" else ()
            self.batcher = Batcher(
                self.runner,
                self.layout,
                batching,
                self,
                instances=settings.instances,
                name=name,
                warm=warm,
                # writing a log may block, and values of a request should not say for how long the event loop stands
                inline=self.device == "cpu" and not others and log is None and not sized_by_values(self.session.model),
                others=other_runners,
            )
            self._before, self._measured = before, device
            self.memory: dict[str, Any] = {}
            #: Executions; memory of the process when the engine kept little, and whether the next one gives it back.
            self._executions, self._rested, self._releasing = 0, 0, False
        except BaseException:
            self._release()
            raise

    def start(self) -> None:
        """Serve. Where this raises or is interrupted, the version is to be closed."""
        try:
            self.batcher.start()
        except XpuRuntimeError as error:
            raise _warm_up_failed(error) from error
        self.memory = self._memory(self._before, self._measured)
        if self._measured == "cpu" and self.device == "cpu":
            self._rested = process_memory().resident or 0

    @property
    def device(self) -> str:
        """The device that the session runs on."""
        return self.session.plan.device

    @property
    def devices(self) -> str:
        """All devices that it runs on."""
        return ",".join(session.plan.device for session in self.sessions)

    def memory_usage(self) -> list[tuple[str, int]]:
        """Return devices and bytes, one pair for each session."""
        disk = size_on_disk(self.path) if self.path else 0
        others = [(session.plan.device, max(sum(session.memory().values()), disk)) for session in self.sessions[1:]]
        return [(self.memory["device"], self.memory["bytes"]), *others]

    @property
    def lock(self) -> Lock | None:
        """The lock that the session was opened under."""
        return self.session.lock

    def refused(self, error: ServingError) -> None:
        """Count a request that was refused before it was queued."""
        if error.code not in _NOT_COUNTED:
            self.statistics.failed(_failure_of(error))

    def progress(self) -> tuple[bool, str]:
        """Return whether the model makes progress, else why not."""
        if self.batcher.broken:
            return False, f"model {self.name!r}: its batcher has ended: {self.batcher.broken}"
        if self._failing:
            return False, f"model {self.name!r}: the last {self._failed_runs} executions failed ({self._failing})"
        state = self.batcher.state()
        bound = self.settings.max_execution
        if state.executing > bound:
            return False, (
                f"model {self.name!r}: a batch has been running for {state.executing:.1f} s, and max_execution is "
                f"{bound:g} s"
            )
        if state.oldest_deadline is not None and state.oldest_deadline < -_LATE:
            return False, (
                f"model {self.name!r}: a request has been waiting {-state.oldest_deadline:.1f} s past its deadline"
            )
        for watcher in self._watchers:
            good, reason = watcher.verdict()
            if not good:
                return False, f"model {self.name!r}: {reason}"
        return True, ""

    def watched(self) -> dict[str, Any]:
        """Return what canary and shadow found so far, by their names."""
        return {watcher.name: watcher.to_dict() for watcher in self._watchers}

    def drain(self, timeout: float | None = None) -> bool:
        """Take no request any more, and answer those that were accepted; return whether all are."""
        return self.batcher.drain(timeout)

    def close(self) -> None:
        """Fail what has no answer yet, and release the model; a session that was given stays open."""
        ended = self.batcher.close()
        if ended:
            self._release()

    def executed(self, execution: Execution) -> None:
        """Take one execution; see `Observer`."""
        self.statistics.executed(execution)
        with self._counting:
            executions, rows = self.ran[execution.place]
            self.ran[execution.place] = executions + 1, rows + execution.rows
        if self._rested:
            self._watch_growth()
        if not isinstance(execution.error, ServingError) or execution.error.code is not Status.INTERNAL:
            if execution.error is None:
                self._failed_runs, self._failing = 0, ""
            return
        self._failed_runs += 1
        if self._failed_runs % _MOST_FAILED == 0:
            self._failing = self._failure_of_probe(execution.error)

    def _watch_growth(self) -> None:
        """Have the engine give back memory that it keeps between executions where the process has grown by much."""
        # The memory of engines grows to that of the largest execution, which no client's size was counted for.
        self._executions += 1
        if self._executions % _LOOKED_AT and not self._releasing:
            return
        taken = process_memory().resident or 0
        if self._releasing:
            self._rested, self._releasing = taken, False
        elif taken - self._rested > max(_GROWN, self.memory["bytes"]) and self.runner.release_idle is not None:
            self.runner.release_idle()
            self._releasing = True

    def _failure_of_probe(self, error: ServingError) -> str:
        """Return why every run fails; nothing where the inputs of the last ones are to blame."""
        if self._probe is not None:
            try:
                self.batcher.probe(self._probe)
            except Exception as failed:
                return f"{type(failed).__name__}"
            return ""
        return error.code.name

    def answered(self, job: Job, now: float) -> None:
        """Answer a request; see `Observer`."""
        seconds = now - job.entry.arrived
        error: ServingError | None = None
        if not job.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            error = ServingError(Status.CANCELLED, "the client cancelled the request")
            self.statistics.failed("CANCELED", seconds)
            fail(job.future, error)
        else:
            outcome = self.outcome(job, now)
            if isinstance(outcome, ServingError):
                error = outcome
                fail(job.future, error)
            else:
                answer(job.future, outcome)
        if self._log is not None:
            self._log(job.request, error, seconds, job)

    def outcome(self, job: Job, now: float) -> InferResponse | ServingError:
        """Count a request, and return its response or error; see `Observer`."""
        entry = job.entry
        seconds = now - entry.arrived
        error: ServingError
        if entry.outcome == "done":
            try:
                response = self._response(job)
                write = job.request.write
                if write is not None:
                    response.written = write(response)
            except ServingError as refused:  # an output that has no form in JSON
                error = refused
            except Exception as failure:  # the request must get an answer
                error = ServingError(Status.INTERNAL, f"model {self.name!r}: {failure}")
            else:
                for watcher in self._watchers:  # before the caller can write into what it gets
                    watcher.offer(job, response)
                self._succeeded(job, seconds)
                return response
        elif entry.outcome == "failed":
            assert isinstance(entry.error, ServingError)
            error = entry.error
        else:
            where = "while it ran" if job.began is not None else "in the queue"
            error = ServingError(
                Status.DEADLINE_EXCEEDED,
                f"model {self.name!r}: the deadline passed after {seconds * 1e3:.1f} ms, {where}. "
                "Fix: allow more time, or send less",
            )
        self.statistics.failed(_failure_of(error), seconds)
        return error

    def _succeeded(self, job: Job, seconds: float) -> None:
        assert job.began is not None
        queued = job.began - job.entry.arrived
        if len(job.executions) == 1:
            (execution,) = job.executions
            self.statistics.succeeded(seconds, queued, execution.input_ns, execution.infer_ns, execution.output_ns)
            return
        self.statistics.succeeded(
            seconds,
            queued,
            sum(execution.input_ns for execution in job.executions),
            sum(execution.infer_ns for execution in job.executions),
            sum(execution.output_ns for execution in job.executions),
        )

    def _response(self, job: Job) -> InferResponse:
        request = job.request
        parameters: dict[str, Parameter] = {}
        if request.parameters.get("xrt_evidence") is True:
            assert job.began is not None
            lock = self.lock
            ran = [execution for execution in job.executions if execution.error is None]  # one that failed was repeated
            total = sum(execution.elements + execution.padding for execution in ran)
            devices = dict.fromkeys(self.sessions[execution.place].plan.device for execution in ran)
            parameters = {
                "xrt_engine": f"{self.session.plan.engine}@{','.join(devices)}",
                "xrt_lock": lock.digest if lock is not None else "",
                "xrt_batch_size": max(execution.batch.rows for execution in ran),
                "xrt_executions": len(ran),
                "xrt_dispatch": ran[-1].batch.reason,
                "xrt_padded": sum(part.padding for part in ran) / total if total else 0.0,
                "xrt_queue_us": int((job.began - job.entry.arrived) * 1e6),
                "xrt_compute_us": sum(execution.compute_ns for execution in job.executions) // 1000,
            }
        return InferResponse(
            request.model, str(self.version), joined(self.layout, job.feed, job.pieces), request.id, parameters
        )

    def _warm_up(self) -> None:
        settings = self.settings
        most = settings.batching.max_batch_size
        fixed = settings.batching.shapes == "fixed"
        if settings.warmup in ("auto", "lock") and self.lock is not None:
            from xpuruntime.inference.locked import probe_at

            for shapes in self.lock.identity.shapes:
                self._run_once(probe_at(self.session.model, shapes.inputs), "lock")
        if settings.warmup == "probe" or (settings.warmup == "auto" and self.lock is None):
            for sizes in warmup_sizes(self.layout):
                for rows in dict.fromkeys([most] if fixed else [1, max(most, 1)]):
                    self._run_once(batch_feeds(self.session, self.layout, rows, sizes), "probe", rows)
        if settings.slo is not None:
            curve, source = curve_of(self.session, self.layout, settings, self.runner, self.path)
            self.limits = choose_limits(curve, settings.slo.p99, source)

    def _begin_with(self, batching: BatchSettings) -> list[dict[str, Any]]:
        """Return inputs that each thread of the batcher runs first: in all sizes that CUDA graphs are captured of."""
        *_, sizes = warmup_sizes(self.layout)
        most = max(batching.max_batch_size, 1)
        rows = (most,) if batching.shapes == "fixed" else batch_sizes(most, batching.preferred_batch_size)
        return [batch_feeds(self.session, self.layout, row, sizes) for row in rows]

    def _run_once(self, feeds: dict[str, Any], source: str, rows: int | None = None) -> None:
        begin = time.perf_counter()
        try:
            for session in reversed(self.sessions):
                results = session.run(feeds)
        except XpuRuntimeError as error:
            raise _warm_up_failed(error) from error
        took = time.perf_counter() - begin
        if self._probe is None or _size(feeds) < _size(self._probe):
            self._probe = feeds
        shapes = {name: list(array.shape) for name, array in feeds.items()}
        self.warmed.append({"source": source, "shapes": shapes, "us": int(took * 1e6)})
        if rows is None:
            return
        for info in self.layout.outputs.values():
            shape = results[info.name].shape
            if info.batch is not None and (len(shape) <= info.batch or shape[info.batch] != rows):
                raise UnsupportedOperationError(
                    f"batching.max_batch_size: {self.settings.batching.max_batch_size}, but the output {info.name!r} "
                    f"has the shape {list(shape)} for {rows} rows. Fix: state 0 for this model"
                )

    def _memory(self, before: int | None, device: str | None) -> dict[str, Any]:
        if locked := locked_size(self.lock, self.device, self.settings):
            return {"bytes": locked, "source": "lock", "device": self.device}
        engine = sum(self.session.memory().values())
        disk = size_on_disk(self.path) if self.path else 0
        after = _memory_taken(device)
        here = self.device == (device or "cpu")
        grown = after - before if before is not None and after is not None and here else 0
        source = "process" if self.device == "cpu" else "device"
        size, source = max((grown, source), (engine, "engine"), (disk, "file"))
        return {"bytes": size, "source": source, "device": self.device}

    def _release(self) -> None:
        for watcher in self._watchers:
            watcher.close()
        for session in self.sessions if self._own else ():
            session.close()


def _size(feeds: dict[str, Any]) -> int:
    return sum(int(array.nbytes) for array in feeds.values())


def _warm_up_failed(error: XpuRuntimeError) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"the warm-up with probe inputs failed: {error}. Fix: make a lock with inputs that fit, or state warmup: none"
    )


def _memory_taken(device: str | None) -> int | None:
    """Return what this process has of the host's memory, or what is taken of a CUDA device's, by everybody."""
    if device is None or not device.startswith("cuda"):
        return process_memory().resident
    from xpuruntime import _core

    free, total = _core.DeviceManager.instance().memory_info(device)
    return total - free


def _failure_of(error: ServingError) -> Failure:
    if error.code in (Status.RESOURCE_EXHAUSTED, Status.DEADLINE_EXCEEDED, Status.UNAVAILABLE):
        return "REJECTED"
    if error.code is Status.CANCELLED:
        return "CANCELED"
    return "BACKEND" if error.code is Status.INTERNAL else "OTHER"
