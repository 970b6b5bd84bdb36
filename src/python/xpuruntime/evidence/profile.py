# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Traces for Perfetto and chrome://tracing: a recording as events, and the file."""

from __future__ import annotations

import gzip
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from xpuruntime.errors import InputError
from xpuruntime.evidence.kernel_records import short_name
from xpuruntime.files.paths import json_bytes, reason_of, user_path
from xpuruntime.files.writing import check_writable, replace_file
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall, Mark, Range, WorkSource

_Span = TypeVar("_Span", "Mark", "Range")

#: Processes of devices in the trace: this and their index. Those of the system are far below.
_DEVICES = 1_000_000_000
#: Tracks of the host for ranges that overlap others of their thread: from this on. Those of threads are far below.
_ROWS = 1_000_000_000
#: The process of what engines have recorded.
_ENGINES = 2_000_000_000


def chrome_trace(
    recording: DeviceRecording, marks: Iterable[Mark] = (), metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a trace."""
    return _Trace(recording).document(marks, dict(metadata or {}))


class _Trace:
    def __init__(self, recording: DeviceRecording) -> None:
        self._recording = recording
        self._base = recording.start_ns
        self._host = os.getpid()
        self._events: list[dict[str, Any]] = []
        self._flows = 0

    def document(self, marks: Iterable[Mark], metadata: dict[str, Any]) -> dict[str, Any]:
        self._ranges()
        self._calls()
        self._work()
        self._marks(marks)
        return {
            "schemaVersion": 1,
            "baseTimeNanoseconds": self._base,
            "displayTimeUnit": "ms",
            "traceEvents": self._events,
            "metadata": {"source": self._recording.source, "notes": list(self._recording.notes), **metadata},
        }

    def _at(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def _slice(
        self, process: int, thread: int, category: str, name: str, start: int, end: int, args: Mapping[str, Any]
    ) -> None:
        self._events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": self._at(start),
                "dur": max(0, end - start) / 1000,
                "args": dict(args),
            }
        )

    def _named(self, what: str, process: int, thread: int, **args: Any) -> None:
        self._events.append({"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args})

    def _ranges(self) -> None:
        self._named("process_name", self._host, 0, name="host")
        self._named("process_sort_index", self._host, 0, sort_index=0)
        for thread in sorted({range_.thread for range_ in self._recording.ranges}):
            self._named("thread_name", self._host, thread, name=f"thread {thread}")
        threads: dict[int, list[Range]] = defaultdict(list)
        for range_ in self._recording.ranges:
            threads[range_.thread].append(range_)
        next_row = _ROWS
        for thread, held in threads.items():
            for number, row in enumerate(_rows(held)):
                track = next_row if number else thread
                if number:  # ranges of tasks that take turns on one thread
                    self._named("thread_name", self._host, next_row, name=f"thread {thread}, row {number + 1}")
                    next_row += 1
                for range in row:
                    args: dict[str, Any] = {"range": range.id}
                    if not range.finished:
                        args["unfinished"] = True
                    self._slice(self._host, track, range.category, range.name, range.start_ns, range.end_ns, args)

    def _calls(self) -> None:
        known = {range_.thread for range_ in self._recording.ranges}
        others = sorted({call.thread for call in self._recording.calls} - known)
        for thread in others:
            name = f"thread {thread}" if thread else "threads without ranges"
            self._named("thread_name", self._host, thread, name=name)
        for call in self._recording.calls:
            args = {"correlation": call.correlation}
            self._slice(self._host, call.thread, "cuda", call.name, call.start_ns, call.end_ns, args)

    def _work(self) -> None:
        calls = {call.correlation: call for call in self._recording.calls}
        names = {range_.id: range_.name for range_ in self._recording.ranges}
        tracks: dict[tuple[int, int], set[str]] = defaultdict(set)
        for work in self._recording.work:
            process = _DEVICES + work.device
            tracks[process, work.stream].add(work.kind)
            args = _details(work)
            if work.range in names:
                args["started in"] = names[work.range]
            if work.kind in ("allocation", "release"):
                self._events.append(
                    {
                        "ph": "i",
                        "s": "t",
                        "cat": work.kind,
                        "name": work.name,
                        "pid": process,
                        "tid": work.stream,
                        "ts": self._at(work.start_ns),
                        "args": args,
                    }
                )
                continue
            self._slice(process, work.stream, work.kind, work.name, work.start_ns, work.end_ns, args)
            call = calls.get(work.correlation) if work.correlation else None
            if call is not None and work.kind != "wait":
                self._flows += 1  # one call may start many, as that of a graph does: each arrow has its own number
                flow = {"cat": "launch", "name": "launch", "id": self._flows}
                start = self._at(call.start_ns)
                self._events.append({"ph": "s", **flow, "pid": self._host, "tid": call.thread, "ts": start})
                end = max(start, self._at(work.start_ns))
                self._events.append({"ph": "f", "bp": "e", **flow, "pid": process, "tid": work.stream, "ts": end})
        for process in sorted({process for process, _ in tracks}):
            self._named("process_name", process, 0, name=f"cuda:{process - _DEVICES}")
            self._named("process_sort_index", process, 0, sort_index=10 + process - _DEVICES)
        for process, stream in sorted(tracks):
            self._named("thread_name", process, stream, name=f"stream {stream}")

    def _marks(self, marks: Iterable[Mark]) -> None:
        tracks: dict[tuple[str, int], list[Mark]] = defaultdict(list)
        for mark in marks:
            tracks[mark.track, mark.thread].append(mark)
        if not tracks:
            return
        self._named("process_name", _ENGINES, 0, name="engines and xpuruntime")
        self._named("process_sort_index", _ENGINES, 0, sort_index=5)
        number = 0
        for (track, _), held in tracks.items():
            for row in _rows(held):
                number += 1
                self._named("thread_name", _ENGINES, number, name=track)
                for entry in row:
                    self._slice(_ENGINES, number, track, entry.name, entry.start_ns, entry.end_ns, entry.details)


def _rows(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Return spans of time in rows: on one, each is after the one before, or inside it. Others cannot be drawn."""
    rows: list[list[_Span]] = []
    open_: list[list[int]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for row, ends in zip(rows, open_, strict=True):
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                row.append(span)
                ends.append(span.end_ns)
                break
        else:
            rows.append([span])
            open_.append([span.end_ns])
    return rows


def _details(work: DeviceWork) -> dict[str, Any]:
    args: dict[str, Any] = {"correlation": work.correlation, "stream": work.stream}
    if work.bytes:
        args["bytes"] = work.bytes
    if work.bytes and work.kind == "copy" and work.end_ns > work.start_ns:
        args["GB/s"] = round(work.bytes / (work.end_ns - work.start_ns), 3)
    for name in ("source", "destination"):
        if getattr(work, name):
            args[name] = getattr(work, name)
    if work.graph:
        args["graph"] = work.graph
    return args


def trace_path(path: str | os.PathLike[str]) -> Path:
    """Return where a trace goes."""
    target = user_path(path, "the trace")
    if not target.name.endswith((".json", ".json.gz")):
        msg = f"a trace is written as '.json' or '.json.gz', and the path is '{target}': end it so"
        raise InputError(msg)
    return target


def check_trace(path: str | os.PathLike[str]) -> None:
    """Refuse a path to which no trace can be written."""
    target = trace_path(path)
    try:
        check_writable(target)
    except OSError as error:
        raise cannot_write(target, error) from error


def write_trace(target: Path, document: dict[str, Any]) -> None:
    """Write a trace, compressed if its name ends in ``.gz``. A crash or a full disk leaves the old file, or none."""
    data = json_bytes(document)
    try:
        replace_file(target, gzip.compress(data, 6) if target.name.endswith(".gz") else data, private=False)
    except OSError as error:
        raise cannot_write(target, error) from error


def cannot_write(target: Path, error: Exception) -> InputError:
    """Return the error for a trace that cannot be written."""
    return InputError(
        f"cannot write the trace to '{target}': {reason_of(error)}. Fix: give the path of a file, in a folder that "
        "exists, is writable and has free space"
    )


#: Rows of each table that are printed.
_SHOWN = 20


class Share(NamedTuple):
    """What one kind of thing took.

    Attributes
    ----------
    what : {"range", "kernel", "copy", "fill", "wait", "allocation", "release"}
    name : str
        Of a copy, from where to where.
    times : int
    us : float
        Microseconds, all together: of ranges of the host, with what ran inside.
    bytes : int
    """

    what: Literal["range", "kernel", "copy", "fill", "wait", "allocation", "release"]
    name: str
    times: int
    us: float
    bytes: int


class Profile(Shown):
    """What ran in a block of `xpuruntime.profile`; see there.

    Parameters
    ----------
    recording : DeviceRecording
    marks : sequence of Mark
    """

    WIDTH = 120

    def __init__(self, recording: DeviceRecording, marks: tuple[Mark, ...] = ()) -> None:
        self._recording, self._marks = recording, marks

    @property
    def source(self) -> WorkSource:
        """Where device work comes from: ``"cupti"``, ``"kineto"``, ``"events"`` or ``"none"``."""
        return self._recording.source

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be recorded, and why."""
        return self._recording.notes

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Pieces of the host's time, in the order in which they began."""
        return self._recording.ranges

    @property
    def work(self) -> tuple[DeviceWork, ...]:
        """What devices did, in the order in which it began."""
        return self._recording.work

    @property
    def calls(self) -> tuple[HostCall, ...]:
        """Calls of CUDA's that gave devices work, or waited for them."""
        return self._recording.calls

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What engines and other parts of xpuruntime reported, such as the nodes of an explained pass."""
        return self._marks

    @property
    def dropped(self) -> int:
        """Records that came after the limit, and are lost."""
        return self._recording.dropped

    @property
    def duration_us(self) -> float:
        """Microseconds from the first to the last moment."""
        return (self._recording.end_ns - self._recording.start_ns) / 1000

    def shares(self) -> tuple[Share, ...]:
        """Return what each range, kernel, kind of copy and so on took, the longest first within a kind."""
        sums: dict[tuple[Any, str], list[tuple[float, int]]] = defaultdict(list)
        for range_ in self.ranges:
            sums["range", range_.name].append(((range_.end_ns - range_.start_ns) / 1000, 0))
        for work in self.work:
            name = f"{work.source or '?'} -> {work.destination or '?'}" if work.kind == "copy" else work.name
            sums[work.kind, name].append((work.us, work.bytes))
        order = ("range", "kernel", "copy", "fill", "wait", "allocation", "release")
        shares = [
            Share(what, name, len(held), sum(us for us, _ in held), sum(size for _, size in held))
            for (what, name), held in sums.items()
        ]
        return tuple(sorted(shares, key=lambda share: (order.index(share.what), -share.us, share.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain values."""
        return {
            "schema": "xpuruntime.profile/1",
            "source": self.source,
            "notes": list(self.notes),
            "duration_us": self.duration_us,
            "dropped": self.dropped,
            "shares": [share._asdict() for share in self.shares()],
        }

    def save_trace(self, path: str | os.PathLike[str], metadata: dict[str, Any] | None = None) -> Path:
        """Write a trace for Perfetto and ``chrome://tracing``. A crash or a full disk leaves the old file, or none.

        Parameters
        ----------
        path : path
            Ends in ``.json``, or ``.json.gz`` for a compressed one.
        metadata : dict, optional
            Plain values to keep in it.

        Raises
        ------
        InputError
            The path ends otherwise, or the file cannot be written.
        """
        target = trace_path(path)
        write_trace(target, chrome_trace(self._recording, self._marks, metadata))
        return target

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import table

        parts: list[RenderableType] = [
            Text(f"{self.duration_us / 1000:.2f} ms; device work: {_SOURCES[self.source]}"),
        ]
        shares = self.shares()
        device = sum(share.us for share in shares if share.what in ("kernel", "copy", "fill"))
        for title, kinds in (("host", ("range",)), ("devices", ("kernel", "copy", "fill", "wait", "allocation"))):
            rows = [share for share in shares if share.what in kinds]
            if not rows:
                continue
            shown = table(title, ("what", "name", ">times", ">us", ">share", ">bytes"))
            for row in rows[:_SHOWN]:
                counts = row.what in ("kernel", "copy", "fill") and device > 0
                share = f"{row.us / device:.0%}" if counts else ""
                size = f"{row.bytes:,}" if row.bytes else ""
                name = short_name(row.name) if row.what == "kernel" else row.name
                shown.add_row(row.what, Text(name), str(row.times), f"{row.us:.1f}", share, size)
            parts.append(shown)
            if len(rows) > _SHOWN:
                parts.append(Text(f"and {len(rows) - _SHOWN} more"))
        parts += [Text(f"note: {note}") for note in self.notes]
        return Group(*parts)

    def __repr__(self) -> str:
        counts = f"{len(self.ranges)} ranges, {len(self.work)} pieces of device work"
        return f"<Profile of {self.duration_us / 1000:.2f} ms: {counts}, source {self.source}>"


_SOURCES = {
    "none": "not recorded",
    "cupti": "by CUPTI",
    "kineto": "by PyTorch's profiler",
    "events": "by CUDA events, of kernels that xpuruntime dispatches",
}
