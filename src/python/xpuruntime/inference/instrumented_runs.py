# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumentation of session runs: a range around every run of every session, removed without a trace."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.base import LoadedModel, closed
from xpuruntime.runtime.profiler import Mark, tell
from xpuruntime.runtime.session_registry import open_bindings, open_sessions, set_call_instrumentation, set_open_hook

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["InstrumentedRuns"]

#: Attribute of an instrumented function: its recorder, and the function that it replaces; ``None``: a method.
_MARK = "xpuruntime_watch"


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
                owner = self._owners.pop()()
                if owner is None:
                    continue
                watcher, before = getattr(owner.run, _MARK, (None, None))
                if watcher is not self:
                    continue
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
    """Return `run` with a range around it."""
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
