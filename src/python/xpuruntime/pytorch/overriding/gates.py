# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gates: what stands for an operator, in C++, so that a call that no rule speaks of costs little.

A gate calls the native kernel where no policy holds, and where the route of the call is known and native. Everything
else is looked at by Python: calls that are not known yet, those that kernels of ours serve, and all calls while rules
ask for phase or module, a thread has a policy of its own, or somebody watches.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from xpuruntime import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.overriding.native import Native

__all__ = ["count_thread", "gate", "set_policy", "set_watched"]

_lock = threading.Lock()
_routes: dict[Any, Any] | None = None
_by_call = False
_threads = 0
_watched = False


def gate(native: Native, slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gate before a native kernel.

    Parameters
    ----------
    native : Native
    slow : callable
        Called with the arguments of the gate: the dispatcher's keyset, then the operator's. It keeps routes under
        `calls.call_key` of the native kernel's name, the operator's arrays in their order, and `out` where it is given.
    """
    return _core.make_gate(native.name, slow, native)


def set_policy(routes: dict[Any, Any] | None, *, by_call: bool) -> None:
    """Say what routes the policy of the process has, and whether keys alone do not decide them. ``None``: no policy."""
    global _routes, _by_call
    with _lock:
        _routes, _by_call = routes, by_call
        _tell()


def count_thread(step: int) -> None:
    """Say that one thread more, or less, has a policy of its own."""
    global _threads
    with _lock:
        _threads += step
        _tell()


def set_watched(watched: bool) -> None:
    """Say whether every call is watched."""
    global _watched
    with _lock:
        _watched = watched
        _tell()


def _tell() -> None:
    _core.set_gates(_routes, _by_call or _watched or _threads > 0)
