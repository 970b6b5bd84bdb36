# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`WatchedRuns`: puts a range around every run of every session, and takes it away again without a trace."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.base import LoadedModel, closed
from xpuruntime.runtime.open_sessions import open_bindings, open_sessions, watch_opened

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WatchedRuns"]


class WatchedRuns:
    """Watches the runs of sessions and bindings: of those that are open, and of those opened while it does.

    A run costs nothing where nobody watches: the hot path itself is exchanged, and put back at the end. What a program
    took out of a session before, as in ``run = session.run``, is not seen.
    """

    def __init__(self) -> None:
        self._exchanged: list[tuple[Any, Callable[..., Any], Callable[..., Any] | None]] = []

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
        while self._exchanged:
            owner, ours, before = self._exchanged.pop()
            if vars(owner).get("run") is not ours:
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
        if binding is not None:
            self._exchange(binding, f"{name}, bound" + (", CUDA graph" if binding.graph == "captured" else ""))
            return
        self._exchange(session, name)
        if type(loaded).run_async is LoadedModel.run_async:  # its threads call `run` of the model
            self._exchange(loaded, name)

    def _exchange(self, owner: Any, name: str) -> None:
        run = owner.run
        if run is closed or not hasattr(owner, "__dict__"):
            return
        begin, end = _core.profiler_begin, _core.profiler_end

        def watched(*args: Any, **keywords: Any) -> Any:
            number = begin(name, "run")
            try:
                return run(*args, **keywords)
            finally:
                end(number)

        self._exchanged.append((owner, watched, vars(owner).get("run")))
        owner.run = watched
