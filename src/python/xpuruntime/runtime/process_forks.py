# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Process forks: what a child of `os.fork` may do with models that were loaded before it.

The child has a copy of the memory and one thread: threads of engines are not there. What waits for one of them waits
for ever, and so does what ends a native model, which joins its threads, and what libraries do at exit. So a child never
ends such a model: it is kept until the process is gone, which exits as `os._exit` does once Python has ended.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Forks", "Rests", "fork_lock", "keep_in_child", "reset_in_child", "rest_for_fork"]


class Forks(Protocol):
    """What a child of a fork has to treat otherwise."""

    def in_child(self) -> None:
        """Begin anew, in the child, before anything else runs there."""


class Rests(Protocol):
    """What a fork has to wait for."""

    def before_fork(self) -> None:
        """Come to rest, in the thread that forks."""

    def in_parent(self) -> None:
        """Go on, in the thread that has forked."""


_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_reset: weakref.WeakSet[Forks] = weakref.WeakSet()
_rest: weakref.WeakSet[Rests] = weakref.WeakSet()
_locks: list[Any] = []


def keep_in_child(model: Any) -> None:
    """Have a child never drop an object; there its attribute ``forked`` is true."""
    _kept.add(model)


def reset_in_child(one: Forks) -> None:
    """Have `in_child` called in a child."""
    _reset.add(one)


def rest_for_fork(one: Rests) -> None:
    """Have `before_fork` and `in_parent` called around a fork."""
    _rest.add(one)


def fork_lock(make: Callable[[], Any] = threading.Lock) -> Any:
    """Return a lock of a module that is free in a child, whoever held it when the process was forked."""
    lock = make()
    _locks.append(lock)
    return lock


#: What came to rest for the fork that this thread is about to make.
_resting = threading.local()


def _before_fork() -> None:
    _resting.those = []
    for one in list(_rest):
        _resting.those.append(one)
        one.before_fork()


def _in_parent() -> None:
    for one in _resting.__dict__.pop("those", ()):
        one.in_parent()


def _in_child() -> None:
    _resting.__dict__.pop("those", None)
    for lock in _locks:
        lock._at_fork_reinit()
    models = list(_kept)
    if models:
        from xpuruntime import _core  # planning and the doctor import this module without the core

        _core.skip_exit_handlers()
    for model in models:
        _core.keep_forever(model)
        model.forked = True
    for one in list(_reset):
        one.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
