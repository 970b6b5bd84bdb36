# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Environment variables that hold while communicators are made."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from xpuruntime import _core
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["outer_environment", "variables_set"]

#: Seconds between looks at whether other blocks have ended.
_PAUSE = 0.002

_lock = threading.Lock()
_held: dict[str, str] = {}
_before: dict[str, str | None] = {}
_holders = 0


def outer_environment() -> dict[str, str]:
    """Return the environment of the process as it is outside of all `variables_set` blocks."""
    outer: dict[str, str] = _core.call_aside(_outer)
    return outer


# What takes the lock runs aside, where nothing interrupts it.
def _outer() -> dict[str, str]:
    with _lock:
        outer = {**os.environ, **{name: value for name, value in _before.items() if value is not None}}
        for name, value in _before.items():
            if value is None:
                outer.pop(name, None)
        return outer


class variables_set:  # noqa: N801 - used like a function
    """Set variables of the process inside a ``with`` block, and put back what was there.

    Blocks of several threads that want the same variables run together, as ranks that are threads must; those that
    want others wait. A block without variables waits too, so that it never sees those of another. An interruption at
    any point leaves the environment as it was.
    """

    def __init__(self, variables: Mapping[str, str], timeout: float) -> None:
        self._variables, self._timeout = dict(variables), timeout
        self._holds = False

    def _enter(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not _core.call_aside(self._take):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"other communicators of this process are still being made after {self._timeout:g} s, with "
                    f"{_words(_held)}, and this one needs {_words(self._variables)}. Fix: make communicators of "
                    "different policies one after the other, in the same order in every process",
                    engine="nccl",
                )
            time.sleep(_PAUSE)

    def _exit(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        _core.call_aside(self._give)

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_exit, _leave)

    def _take(self) -> bool:
        global _holders
        with _lock:
            if _holders and _held != self._variables:
                return False
            if not _holders:
                _held.update(self._variables)
                _before.update({name: os.environ.get(name) for name in self._variables})
                os.environ.update(self._variables)
            _holders += 1
            self._holds = True
            return True

    def _give(self) -> None:
        global _holders
        with _lock:
            if not self._holds:
                return
            self._holds = False
            _holders -= 1
            if _holders:
                return
            for name, value in _before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            _before.clear()
            _held.clear()


def _words(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "no algorithm or protocol"
