# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ctrl-C at a known place: inside of a function, and while the main thread waits."""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["press", "press_before", "press_when"]


def press() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def press_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with Ctrl-C pressed at its begin."""

    @functools.wraps(function)
    def pressed(*arguments: Any, **keywords: Any) -> Any:
        press()
        return function(*arguments, **keywords)

    return pressed


def press_when(waits: Callable[[], Any]) -> threading.Thread:
    """Start a thread that presses Ctrl-C in the main thread as soon as `waits()` is true, and return it."""

    def work() -> None:
        while not waits():
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=work)
    thread.start()
    return thread
