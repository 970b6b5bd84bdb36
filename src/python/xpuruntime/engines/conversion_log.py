# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conversion log: copies and conversions of inputs and models, so that none is silent."""

from __future__ import annotations

import threading

from xpuruntime.evidence.records import Conversion

__all__ = ["ConversionLog"]


class ConversionLog:
    """What was copied or converted, each said once with a count. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, what: str, reason: str, count: int = 1) -> None:
        """Count one more occurrence."""
        with self._lock:
            self._counts[what, reason] = self._counts.get((what, reason), 0) + count

    def records(self) -> tuple[Conversion, ...]:
        """Return the log so far."""
        with self._lock:
            return tuple(Conversion(what=w, reason=r, count=n) for (w, r), n in self._counts.items())

    def notes(self) -> tuple[str, ...]:
        """Return the log so far as sentences: what was done, and why."""
        return tuple(f"{one.what}: {one.reason}" for one in self.records())
