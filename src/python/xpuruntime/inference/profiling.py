# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`profile`: record what the host and the devices do in a ``with`` block, whichever library makes them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.base import LoadedModel, closed
from xpuruntime.engines.observation import DeviceRecorder
from xpuruntime.errors import InputError
from xpuruntime.evidence.memory_over_time import MemorySample
from xpuruntime.evidence.profile import Profile, check_trace
from xpuruntime.runtime.cpu_and_memory import process_memory
from xpuruntime.runtime.profiler import (
    LIMIT,
    DeviceRecording,
    Mark,
    Marks,
    RecordedBlock,
    profiled,
    record_marks,
    tell,
    warn_beside,
)
from xpuruntime.runtime.session_registry import open_bindings, open_sessions, set_call_instrumentation, set_open_hook
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    import os
    from concurrent.futures import Future

    from rich.console import RenderableType


_lock = threading.Lock()
#: One at a time in a process.
_going_on: _Run | None = None


class _Run:
    """What watches a block; `abandon` ends it at any point."""

    def __init__(self, recorder: DeviceRecorder) -> None:
        self.recorder = recorder
        self.marks = Marks()
        self._before: Marks | None = None
        self._undo: list[Callable[[], Any]] = []

    def start(self) -> None:
        global _going_on
        with _lock:
            refuse_a_second()
            _going_on = self
        self.recorder.start()
        self._watch()

    def stop(self) -> DeviceRecording:
        try:
            return self.recorder.stop()
        finally:
            self.abandon()

    def abandon(self) -> None:
        global _going_on
        if _going_on is self:
            self._unwatch()
            self.recorder.abandon()
            _going_on = None

    def _watch(self) -> None:
        # What undoes a step stands before it, and is dropped after it is done: each may be interrupted, and done twice.
        self._undo.append(lambda: record_marks(self._before))
        self._before = record_marks(self.marks)
        runs = InstrumentedRuns()
        self._undo.append(runs.stop)
        runs.start()

    def _unwatch(self) -> None:
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


def refuse_a_second() -> None:
    """Refuse to begin a profile while another one goes on."""
    if _going_on is not None:
        msg = "a profile goes on already, and there is one at a time in a process: leave its with block first"
        raise InputError(msg)


class profile(Shown, RecordedBlock[_Run]):  # noqa: N801 - used like a function
    """Record what the host and the CUDA devices do in a ``with`` block.

    Ranges of the host are runs of sessions and bindings, kernels that `xpuruntime.ops` and xpuruntime operators inside
    ONNX Runtime dispatch, and what the program names by `range`. The work of devices is seen whoever starts it: ONNX
    Runtime, TensorRT, PyTorch, CuPy or this library. NVIDIA's tools (Nsight) show the ranges, too.

    Parameters
    ----------
    trace : path, optional
        Where to write a trace for Perfetto at the end: ``.json``, or ``.json.gz`` for a compressed one.
    devices : bool
        Whether to record the work of CUDA devices. Without a CUDA device there are ranges alone, and a note says why.
    limit : int
        Ranges, pieces of work, and calls that are kept, of each; what comes after is counted as lost.

    Attributes
    ----------
    result : Profile
        After the block: `ranges`, `work`, `calls`, `shares()`, `save_trace(path)`, `to_dict()`; prints as tables.

    Raises
    ------
    InputError
        When the block is entered: another profile goes on, or the trace cannot be written there. After it: the trace
        could not be written. Reading `result` before the end.

    Notes
    -----
    CUPTI, by which device work is seen, serves one user in a process. While a PyTorch that can use CUDA is loaded, its
    profiler is asked instead, and the trace has PyTorch's operators, too. Where both are taken, kernels that this
    library dispatches are timed by CUDA events, and a note says so. Import PyTorch before a profile, not inside it.

    Examples
    --------
    >>> import numpy as np, xpuruntime as xrt
    >>> with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    ...     with xrt.profile() as prof:
    ...         with prof.range("warm-up"):
    ...             _ = session.run({"image": np.zeros((1, 1, 8, 8), np.float32)})
    >>> [(one.name.split()[0], one.category) for one in prof.result.ranges]
    [('warm-up', 'range'), ('digits.onnx', 'run')]
    """

    def __init__(
        self, trace: str | os.PathLike[str] | None = None, *, devices: bool = True, limit: int = LIMIT
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            msg = (
                f"limit must be a whole number of at least 1, got {limit!r}: it is how many records of a kind are kept"
            )
            raise InputError(msg)
        self._target = trace
        self._devices, self._limit = devices, limit
        self._result: Profile | None = None

    @property
    def result(self) -> Profile:
        """What was recorded."""
        if self._result is None:
            msg = "the profile has no result yet: leave its with block first"
            raise InputError(msg)
        return self._result

    def range(self, name: str) -> profiled:
        """Name a ``with`` block; it nests, and threads have ranges of their own."""
        return profiled(name)

    def _check(self) -> None:
        if self._target is not None:
            check_trace(self._target)
        refuse_a_second()

    def _enter(self) -> profile:
        self._start(_Run(DeviceRecorder(devices=self._devices, limit=self._limit)))
        return self

    def _exit(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        run = self._running()
        with warn_beside(error):
            try:
                recording = run.stop()
            finally:
                self._abandon()
            self._result = Profile(recording, tuple(run.marks.taken))
            if self._target is not None:
                self._result.save_trace(self._target)

    __enter__ = _core.guarded(_enter, RecordedBlock._abandon, _check)
    __exit__ = _core.guarded(_exit, RecordedBlock._abandon)

    def __rich__(self) -> RenderableType:
        return self.result.__rich__() if self._result is not None else _NOT_ENDED

    def __str__(self) -> str:
        return str(self.result) if self._result is not None else _NOT_ENDED


class MemoryWatch:
    """Call it with the name of a checkpoint; `samples` has what was held at each."""

    def __init__(self, held: Callable[[], Mapping[str, int]], device: str) -> None:
        self._held = held
        self._device = device
        self._start = time.perf_counter()
        self._said: dict[str, None] = {}
        self.samples: list[MemorySample] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, each said once."""
        return tuple(self._said)

    def __call__(self, moment: str) -> None:
        """Take a sample."""
        at = (time.perf_counter() - self._start) * 1e6 if self.samples else 0.0
        owners = {f"session: {owner}": held for owner, held in self._of_session().items()}
        owners |= self._of_pools()
        owners |= self._of_process()
        owners |= self._of_device()
        self.samples.append(MemorySample(moment=moment, at_us=at, owners=owners))

    def _of_session(self) -> Mapping[str, int]:
        try:
            return self._held()
        except Exception as error:  # an engine of someone else's may raise anything
            text = " ".join(str(error).split())[:200]
            self._said[f"the engine does not report what the session holds: {type(error).__name__}: {text}"] = None
            return {}

    def _of_pools(self) -> dict[str, int]:
        from xpuruntime.runtime.memory import memory_report

        pools: dict[str, int] = {}
        for pool in memory_report().pools:
            for word, held in (("in use", pool.stats.current), ("cached", pool.stats.cached)):
                owner = f"pool {pool.name}: {word}"
                pools[owner] = pools.get(owner, 0) + held  # names need not be unique
        return pools

    def _of_process(self) -> dict[str, int]:
        now = process_memory()
        if now.resident is None:
            self._said["this system does not report the memory of a process: /proc/self/status is missing"] = None
        told = (("resident", now.resident), ("most resident", now.most_resident))
        return {f"process: {word}": held for word, held in told if held is not None}

    def _of_device(self) -> dict[str, int]:
        if not self._device.startswith("cuda"):
            return {}
        from xpuruntime._core import DeviceManager
        from xpuruntime.errors import XpuRuntimeError

        try:
            free, total = DeviceManager.instance().memory_info(self._device)
        except XpuRuntimeError as error:
            self._said[f"the memory of {self._device} could not be read: {error}"] = None
            return {}
        return {f"{self._device}: used": total - free}


#: Attribute of an instrumented function: its recorder, and the function that it replaces; ``None``: a method.
_MARK = "xpuruntime_watch"
_NOT_ENDED = "the profile has no result yet: its block has not ended"


class InstrumentedRuns:
    """Records the runs of sessions and bindings: of those that are open, and of those opened later until `stop`.

    A run costs nothing where nobody watches: the hot path itself, which sessions and bindings hold as an attribute of
    their own, is exchanged, and put back at the end. What a program took out of a session before, as in
    ``run = session.run``, is not seen. Nothing is kept alive by being watched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._owners: list[weakref.ref[Any]] = []
        self._names: weakref.WeakKeyDictionary[LoadedModel, str] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Watch from now on."""
        set_open_hook(self._opened)
        set_call_instrumentation(self._called)
        for session in open_sessions():
            self._opened(session, None)
        for session, binding in open_bindings():
            self._opened(session, binding)

    def stop(self) -> None:
        """Put everything back, but for what was closed meanwhile."""
        set_open_hook(None)
        set_call_instrumentation(None)
        with self._lock:
            self._stopped = True  # for a thread that is opening a session right now
            while self._owners:
                self._put_back(self._owners[-1]())
                self._owners.pop()

    def _put_back(self, owner: Any) -> None:
        watcher, before = (None, None) if owner is None else getattr(owner.run, _MARK, (None, None))
        if watcher is not self:
            return
        if before is None:
            del owner.run
        else:
            owner.run = before

    def _opened(self, session: Any, binding: Any) -> None:
        loaded = session._loaded
        if loaded is None:
            return
        name = f"{PurePath(session.model.path).name or 'model'} on {session.plan.engine}@{session.plan.device}"
        with self._lock:
            if binding is not None:
                graph = ", CUDA graph" if binding.graph == "captured" else ""
                self._exchange(binding, f"{name}, bound{graph}")
                return
            self._exchange(session, name)
            self._names[loaded] = name

    def _exchange(self, owner: Any, name: str) -> None:
        held = owner.run
        if self._stopped or held is closed:
            return
        if getattr(held, _MARK, (None, None))[0] is self:  # opened while the watching began
            return
        watched = _in_range(held, name)
        own = getattr(held, "__self__", None) is not owner  # and no method of its class, as an engine plugin may have
        setattr(watched, _MARK, (self, held if own else None))
        self._owners.append(weakref.ref(owner))
        owner.run = watched

    def _called(self, loaded: LoadedModel, method: str) -> Callable[..., Any]:
        """Return a method of a model as it is called now: by its threads, by `explain`, or for a request."""
        held: Callable[..., Any] = getattr(loaded, method)
        name = self._names.get(loaded)
        if name is None:
            return held
        if method == "run":
            return _in_range(held, name)
        own = type(loaded).run_async is not LoadedModel.run_async  # the engine's own, which calls no `run`
        return _told(held, name) if own else held


def _in_range(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    begin, end = _core.profiler_begin, _core.profiler_end

    def watched(*args: Any, **keywords: Any) -> Any:
        number = begin(name, "run")
        try:
            return run(*args, **keywords)
        finally:
            end(number)

    return watched


def _told(run_async: Callable[..., Future[Any]], name: str) -> Callable[..., Any]:
    """Return `run_async` with a range around the handing over, and a mark from there until the result is there."""

    def watched(*args: Any, **keywords: Any) -> Future[Any]:
        start, thread = time.time_ns(), threading.get_native_id()
        number = _core.profiler_begin(f"{name}, handed over", "run")
        try:
            future = run_async(*args, **keywords)
        finally:
            _core.profiler_end(number)

        def done(ended: Future[Any]) -> None:
            if not ended.cancelled():
                tell(lambda: [Mark("asynchronous runs", name, start, time.time_ns(), thread, {})])

        future.add_done_callback(done)
        return future

    return watched
