# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`WatchedRuns`: puts a range around every run of every session, and takes it away again without a trace."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.base import LoadedModel, closed
from xpuruntime.runtime.marks import Mark, tell
from xpuruntime.runtime.open_sessions import open_bindings, open_sessions, watch_opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["WatchedRuns"]

#: Attribute of a function of ours: who watches, and what the owner's own attribute was before; ``None``: it had none.
_MARK = "xpuruntime_watch"


class WatchedRuns:
    """Watches the runs of sessions and bindings: of those that are open, and of those opened while it does.

    A run costs nothing where nobody watches: the hot path itself is exchanged, and put back at the end. What a program
    took out of a session before, as in ``run = session.run``, is not seen. Nothing is kept alive by being watched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._owners: list[tuple[weakref.ref[Any], str]] = []

    def start(self) -> None:
        """Watch from now on."""
        watch_opened(self._opened)
        for session in open_sessions():
            self._opened(session, None)
        for session, binding in open_bindings():
            self._opened(session, binding)

    def stop(self) -> None:
        """Put everything back, but for what was closed meanwhile."""
        watch_opened(None)
        with self._lock:
            self._stopped = True  # for a thread that is opening a session right now
            while self._owners:
                known, attribute = self._owners.pop()
                owner = known()
                if owner is None:
                    continue
                watcher, before = getattr(vars(owner).get(attribute), _MARK, (None, None))
                if watcher is not self:
                    continue
                if before is None:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, before)

    def _opened(self, session: Any, binding: Any) -> None:
        loaded = session._loaded
        if loaded is None:
            return
        name = f"{PurePath(session.model.path).name or 'model'} on {session.plan.engine}@{session.plan.device}"
        with self._lock:
            if binding is not None:
                graph = ", CUDA graph" if binding.graph == "captured" else ""
                self._exchange(binding, "run", _in_range, f"{name}, bound{graph}")
                return
            self._exchange(session, "run", _in_range, name)
            self._exchange(loaded, "run", _in_range, name)  # its threads call it, and explain() does
            if type(loaded).run_async is not LoadedModel.run_async:  # the engine's own, which calls no `run`
                self._exchange(loaded, "run_async", _told, name)

    def _exchange(self, owner: Any, attribute: str, wrap: Callable[..., Any], name: str) -> None:
        held = getattr(owner, attribute)
        if self._stopped or held is closed or not hasattr(owner, "__dict__"):
            return
        if getattr(held, _MARK, (None, None))[0] is self:  # opened while the watching began
            return
        watched = wrap(held, name)
        setattr(watched, _MARK, (self, vars(owner).get(attribute)))
        self._owners.append((weakref.ref(owner), attribute))
        setattr(owner, attribute, watched)


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
