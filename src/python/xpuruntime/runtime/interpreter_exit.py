# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interpreter exit while daemon threads are inside of an engine.

An engine's own binding gives the GIL back while it computes. A thread that cannot have it any more is ended there by
Python, which aborts the process where the binding is C++. So at exit daemon threads are kept out of the engines, and
those inside are waited for, as long as a run takes.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.runtime.session_registry import open_bindings, open_sessions

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["interpreter_ends"]

_ENGINES = str(Path(__file__).parents[1] / "engines")
#: Seconds that runs of daemon threads are waited for.
_PATIENCE = 5.0


_ended = threading.Event()
# Called when the main thread has ended, before Python waits for the other threads. `Thread.is_alive` cannot be asked:
# after one interruption inside of it, CPython 3.11 takes the main thread for ended.
threading._register_atexit(_ended.set)  # type: ignore[attr-defined]


def interpreter_ends() -> bool:
    """Say whether the main thread has ended, so that no new work may be given to threads."""
    return _ended.is_set()


def _kept_out(run: Callable[..., Any]) -> Callable[..., Any]:
    def kept_out(*args: Any, **keywords: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return run(*args, **keywords)
        while True:  # until the process is gone
            time.sleep(3600)

    return kept_out


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ENGINES):
            return True
        frame = frame.f_back
    return False


def _keep_daemons_out() -> None:
    owners: list[Any] = [*open_sessions(), *(binding for _, binding in open_bindings())]
    me = threading.get_ident()
    if not owners or len(sys._current_frames()) == 1:
        return
    for owner in owners:
        owner.run = _kept_out(owner.run)
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if not any(_is_inside(frame) for thread, frame in sys._current_frames().items() if thread != me):
            return
        time.sleep(0.001)


atexit.register(_keep_daemons_out)
