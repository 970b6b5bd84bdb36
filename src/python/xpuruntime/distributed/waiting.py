# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Polling with a deadline."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_within", "wait_for"]

#: Asked without a pause for so long, because launches take microseconds; then with pauses that become longer.
_EAGER = 200e-6
_LONGEST_PAUSE = 1e-3


def wait_for(done: Callable[[], bool], seconds: float) -> bool:
    """Return true as soon as `done` does, false when it has not by then. Other Python threads run on."""
    if done():
        return True
    start = time.monotonic()
    deadline = start + seconds
    pause = 20e-6
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return done()
        if now - start < _EAGER:
            time.sleep(0)
            continue
        time.sleep(min(pause, deadline - now))
        pause = min(_LONGEST_PAUSE, pause * 1.5)
    return True


def run_within(work: Callable[[], Any], seconds: float, name: str) -> tuple[bool, Any]:
    """Run `work` on a thread, and wait for it only so long."""
    box: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            box.append((work(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if not box:
        return False, None
    result, error = box[0]
    if error is not None:
        raise error
    return True, result
