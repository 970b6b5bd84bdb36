# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recordings: the ranges and device work that the core records, and marks in every trace that is being taken."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from xpuruntime import _core
from xpuruntime.errors import InputError, warn

__all__ = [
    "LIMIT",
    "TUNING",
    "BlockWatch",
    "DeviceRecording",
    "DeviceWork",
    "HostCall",
    "Mark",
    "Marks",
    "Range",
    "RecordedBlock",
    "WorkKind",
    "WorkSource",
    "mark",
    "profiled",
    "record_marks",
    "start",
    "stop",
    "tell",
    "warn_beside",
]

#: Ranges, pieces of work and calls that are kept, of each, unless somebody says otherwise.
LIMIT: int = _core.PROFILER_LIMIT


def start(*, devices: bool = True, limit: int = LIMIT) -> None:
    """Start a recording.

    Parameters
    ----------
    devices : bool
        Whether to record the work of CUDA devices, by CUPTI or, where that cannot be had, by CUDA events around the
        kernels that this library dispatches.
    limit : int
        Ranges, pieces of work, and calls that are kept, of each.

    Raises
    ------
    InputError
        A recording goes on already.
    """
    _core.profiler_start(devices, limit)


def stop() -> DeviceRecording:
    """Wait for the devices, end the recording and return it."""
    recording = _core.profiler_stop()
    notes = []
    if recording["source"] == "events":
        notes.append(
            "device work is timed by CUDA events around kernels that xpuruntime dispatches, and nothing else of a "
            f"device is seen: {recording['reason']}"
        )
    elif recording["reason"]:
        notes.append(f"ranges of the host only: {recording['reason']}")
    if recording["dropped"]:
        notes.append(
            f"{recording['dropped']} records are lost: more came than are kept. Profile less, or raise the limit"
        )
    return DeviceRecording(
        source=recording["source"],
        notes=tuple(notes),
        start_ns=recording["start_ns"],
        end_ns=recording["end_ns"],
        ranges=tuple(map(Range._make, recording["ranges"])),
        work=tuple(map(DeviceWork._make, recording["work"])),
        calls=tuple(map(HostCall._make, recording["calls"])),
        dropped=recording["dropped"],
    )


class profiled:  # noqa: N801 - used like a function
    """A range around a ``with`` block; costs next to nothing while nobody records."""

    __slots__ = ("_category", "_id", "_name")

    def __init__(self, name: str, category: str = "range") -> None:
        self._name, self._category, self._id = name, category, 0

    def __enter__(self) -> None:
        self._id = _core.profiler_begin(self._name, self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _core.profiler_end(self._id)


WorkKind = Literal["kernel", "copy", "fill", "wait", "allocation", "release"]
WorkSource = Literal["none", "cupti", "kineto", "events"]


class Range(NamedTuple):
    """A named piece of the host's time."""

    id: int
    parent: int
    name: str
    category: str
    thread: int
    start_ns: int
    end_ns: int
    finished: bool = True


class DeviceWork(NamedTuple):
    """One piece of work of a device, or what the host waited for one."""

    kind: WorkKind
    name: str
    device: int
    stream: int
    start_ns: int
    end_ns: int
    range: int = 0
    correlation: int = 0
    graph: int = 0
    bytes: int = 0
    source: str = ""
    destination: str = ""

    @property
    def us(self) -> float:
        """Microseconds."""
        return (self.end_ns - self.start_ns) / 1000


class HostCall(NamedTuple):
    """A call of CUDA's by which the host gave work to a device, or waited for it."""

    name: str
    thread: int
    start_ns: int
    end_ns: int
    correlation: int


class DeviceRecording(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded."""

    source: WorkSource = "none"
    notes: tuple[str, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    ranges: tuple[Range, ...] = ()
    work: tuple[DeviceWork, ...] = ()
    calls: tuple[HostCall, ...] = ()
    dropped: int = 0


class BlockWatch(Protocol):
    """What watches a block: hooks, a profiler, or both."""

    def start(self) -> None:
        """Begin."""
        ...

    def abandon(self) -> None:
        """End at any point, also when nothing was begun, and keep nothing."""
        ...


W = TypeVar("W", bound=BlockWatch)


class RecordedBlock(Generic[W]):
    """What ``explain`` and both ``profile`` share.

    A class derived from it has ``__enter__ = _core.guarded(_enter, _abandon, _check)`` and
    ``__exit__ = _core.guarded(_exit, _abandon)``.
    """

    _watch: W | None = None
    _loss: _core.OnLoss | None = None

    def _start(self, watch: W) -> None:
        self._watch = watch
        self._loss = _core.OnLoss(watch.abandon)
        watch.start()

    def _abandon(self) -> None:
        if self._watch is not None:
            self._watch.abandon()
            if self._loss is not None:
                self._loss.disarm()
            self._watch = self._loss = None

    def _running(self) -> W:
        if self._watch is None:
            name = type(self).__name__
            msg = f"this {name}() is not entered, or its with block has been left already"
            raise InputError(msg)
        return self._watch


@contextlib.contextmanager
def warn_beside(error: BaseException | None) -> Iterator[None]:
    """Finish a profile; where its block has failed with `error`, a failure of the profile is a warning."""
    try:
        yield
    except Exception as failure:
        if error is None:
            raise
        msg = f"the block failed, and so did its profile: {failure}"
        warn(msg)


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
