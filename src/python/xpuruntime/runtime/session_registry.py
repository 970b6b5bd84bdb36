# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions that are open: what wraps their calls, and what a forked child may do with them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_lock = threading.Lock()
_noted: weakref.WeakValueDictionary[int, HoldsMemory] = weakref.WeakValueDictionary()
_bound: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_open_hook: Callable[[Any, Any], None] | None = None


class HoldsMemory(Protocol):
    """What a session is here."""

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner; raise when it is closed."""


def note_open(session: HoldsMemory) -> None:
    """List a session until it is closed or forgotten."""
    with _lock:
        _noted[id(session)] = session
    hook = _open_hook  # read once: another thread may remove it
    if hook is not None:
        hook(session, None)


def note_bound(session: HoldsMemory, binding: Any) -> None:
    """List a binding of a session until it is forgotten."""
    with _lock:
        _bound[binding] = weakref.ref(session)
    hook = _open_hook
    if hook is not None:
        hook(session, binding)


def open_sessions() -> list[HoldsMemory]:
    """Return those noted that still exist, in the order in which they were opened; some may be closed."""
    with _lock:
        return list(_noted.values())


def open_bindings() -> list[tuple[HoldsMemory, Any]]:
    """Return sessions and their bindings that still exist; some may be closed."""
    with _lock:
        return [(session, binding) for binding, known in _bound.items() if (session := known()) is not None]


def set_open_hook(hook: Callable[[Any, Any], None] | None) -> None:
    """Call ``hook(session, None)`` and ``hook(session, binding)`` for what is opened from now on."""
    global _open_hook
    _open_hook = hook


_watching: Callable[[Any, str], Callable[..., Any]] | None = None


def set_call_instrumentation(wrap: Callable[[Any, str], Callable[..., Any]] | None) -> None:
    """Have ``wrap(model, name)`` give what is called in place of a model's method; ``None``: the method itself."""
    global _watching
    _watching = wrap


def instrumented_method(model: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of a loaded model, as whoever watches wants it called."""
    wrap = _watching
    method: Callable[..., Any] = getattr(model, name) if wrap is None else wrap(model, name)
    return method


_ENGINES = str(Path(__file__).parents[1] / "engines")
#: Seconds that runs of daemon threads are waited for.
_PATIENCE = 5.0


_ended = threading.Event()
atexit.register(_ended.set)


def interpreter_ends() -> bool:
    """Say whether the main thread has ended, so that no new work may be given to threads."""
    main = threading.main_thread()
    # It does not ask itself: after a Ctrl-C inside of `is_alive`, CPython 3.11 would take it for ended.
    return _ended.is_set() or (threading.current_thread() is not main and not main.is_alive())


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


class Forks(Protocol):
    """What a child of a fork has to treat otherwise."""

    def in_child(self) -> None:
        """Begin anew, in the child, before anything else runs there."""


class Rests(Protocol):
    """What a fork has to wait for."""

    def before_fork(self) -> None:
        """Come to rest, in the thread that forks."""


_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_reset: weakref.WeakSet[Forks] = weakref.WeakSet()
_rest: weakref.WeakSet[Rests] = weakref.WeakSet()


def keep_in_child(model: Any) -> None:
    """Have a child never drop an object; there its attribute ``forked`` is true."""
    _kept.add(model)


def reset_in_child(owner: Forks) -> None:
    """Have `in_child` called in a child."""
    _reset.add(owner)


def rest_for_fork(owner: Rests) -> None:
    """Have `before_fork` called before a fork."""
    _rest.add(owner)


def _before_fork() -> None:
    for owner in list(_rest):
        owner.before_fork()


def _in_child() -> None:
    models = list(_kept)
    if models:
        from xpuruntime import _core  # planning and the doctor import this module without the core

        _core.skip_exit_handlers()
    for model in models:
        _core.keep_forever(model)
        model.forked = True
    for owner in list(_reset):
        owner.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
