# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Environment variables that hold while communicators are made."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["outer_environment", "variables_set"]

_changed = threading.Condition()
_held: dict[str, str] = {}
_before: dict[str, str | None] = {}
_holders = 0


def outer_environment() -> dict[str, str]:
    """Return the environment of the process as it is outside of all `variables_set` blocks."""
    with _changed:
        outer = {**os.environ, **{name: value for name, value in _before.items() if value is not None}}
        for name, value in _before.items():
            if value is None:
                outer.pop(name, None)
        return outer


@contextmanager
def variables_set(variables: Mapping[str, str], timeout: float) -> Iterator[None]:
    """Set variables of the process inside a ``with`` block, and put back what was there.

    Blocks of several threads that want the same variables run together, as ranks that are threads must; those that
    want others wait. A block without variables waits too, so that it never sees those of another.

    Parameters
    ----------
    variables : mapping of str to str
    timeout : float
        Seconds to wait for blocks that want others.

    Raises
    ------
    EngineError
        If they have not ended by then.
    """
    global _holders
    with _changed:
        if not _changed.wait_for(lambda: _holders == 0 or _held == variables, timeout):
            raise EngineError(
                f"other communicators of this process are still being made after {timeout:g} s, with "
                f"{_words(_held)}, and this one needs {_words(variables)}. Fix: make communicators of different "
                "policies one after the other, in the same order in every process",
                engine="nccl",
            )
        if _holders == 0:
            _held.clear()
            _held.update(variables)
            _before.update({name: os.environ.get(name) for name in variables})
            os.environ.update(variables)
        _holders += 1
    try:
        yield
    finally:
        with _changed:
            _holders -= 1
            if _holders == 0:
                for name, value in _before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                _before.clear()
                _held.clear()
                _changed.notify_all()


def _words(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "no algorithm or protocol"
