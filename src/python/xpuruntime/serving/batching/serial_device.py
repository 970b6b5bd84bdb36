# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SerialDevice`: until when a batch may grow behind another one, on a device that computes one after the other.

A second instance prepares the inputs of the next batch while the device computes. Sent as soon as its delay is over,
that batch is often small, and then waits all the same. So it is held back until the one before is about to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpuruntime.serving.batching.entries import Dispatch

__all__ = ["SerialDevice"]

#: Weight of the latest batch in the expected times of one.
_LATEST = 0.2
#: Share of a batch's time that the next one is sent before its expected end, beside what preparing takes.
_AHEAD = 0.25


class SerialDevice:
    """Expected end of the batches that were sent to a device, from the times of earlier ones."""

    def __init__(self) -> None:
        self._running: dict[Dispatch, None] = {}
        self._last_end = 0.0
        self._compute: float | None = None
        self._preparation = 0.0

    def began(self, batch: Dispatch) -> None:
        """Take a batch that was sent."""
        self._running[batch] = None

    def ended(self, batch: Dispatch, now: float, preparation: float) -> None:
        """Take the end of a batch, and the seconds until its inputs were ready."""
        self._running.pop(batch, None)
        seconds = now - max(batch.at, self._last_end)
        self._last_end = now
        first = self._compute is None
        self._compute = seconds if self._compute is None else self._compute + _LATEST * (seconds - self._compute)
        self._preparation += (1.0 if first else _LATEST) * (preparation - self._preparation)

    def hold_until(self) -> float | None:
        """Return up to when another batch would only wait; `None`: nothing runs, or no batch has been timed yet."""
        if not self._running or self._compute is None:
            return None
        begin = max(next(iter(self._running)).at, self._last_end)
        end = begin + len(self._running) * self._compute
        return end - _AHEAD * self._compute - self._preparation
