# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Process forks: what a child of `os.fork` may do with models that were loaded before it.

The child has a copy of the memory and one thread: threads of engines are missing. What waits for one of them waits
for ever, and so does what ends a native model, which joins its threads, and what libraries do at exit. So a child never
ends such a model: it is kept until the process is gone, which exits as `os._exit` does once Python has ended.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

__all__ = ["Forks", "Rests", "keep_in_child", "reset_in_child", "rest_for_fork"]


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
