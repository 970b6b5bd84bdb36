# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`mark`: trace events of this library, in every trace that is being taken."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

__all__ = ["TUNING", "Mark", "Marks", "mark", "record_marks", "tell"]

#: Name of the range around the measuring of kernels, so that a profile does not take that for the work of the program.
TUNING = "xpuruntime tuning"


class Mark(NamedTuple):
    """Something that took its time."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    thread: int
    details: dict[str, Any]


class Marks:
    """Takes marks, from any thread."""

    def __init__(self) -> None:
        self.taken: list[Mark] = []


_watching: Marks | None = None


def record_marks(marks: Marks | None) -> Marks | None:
    """Record marks that end from now on in `marks`; ``None`` stops recording. Returns the previous recorder."""
    global _watching
    before, _watching = _watching, marks
    return before


def tell(make: Callable[[], Iterable[Mark]]) -> None:
    """Add marks of work that has ended to the trace being taken; without one, `make` is not called."""
    watching = _watching
    if watching is not None:
        watching.taken.extend(make())


class mark:  # noqa: N801 - used like a function
    """Mark a ``with`` block for whoever takes a trace; costs next to nothing while nobody does."""

    __slots__ = ("_details", "_name", "_start", "_track")

    def __init__(self, track: str, name: str, **details: Any) -> None:
        self._track = track
        self._name = name
        self._details = details
        self._start = 0

    def __enter__(self) -> None:
        if _watching is not None:
            self._start = time.time_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watching = _watching
        if watching is not None and self._start:
            thread = threading.get_native_id()
            watching.taken.append(Mark(self._track, self._name, self._start, time.time_ns(), thread, self._details))
