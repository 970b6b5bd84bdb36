# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reader of the profile that ONNX Runtime writes: one value per node, medians over all runs but the first."""

from __future__ import annotations

import bisect
import json
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime import _core
from xpuruntime.engines.observation import DeviceRecorder
from xpuruntime.engines.onnxruntime.observing.kernels import DeviceTimes, with_device_times
from xpuruntime.errors import EngineError, XpuRuntimeError
from xpuruntime.evidence.records import DeviceKernel, Time
from xpuruntime.runtime.profiler import DeviceRecording, Mark

if TYPE_CHECKING:
    import os


_SUFFIX = "_kernel_time"
#: ONNX Runtime drops what comes after this many events.
_EVENT_LIMIT = 1_000_000
#: Nodes that run other nodes inside their own time.
_HOLDERS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


class TensorSeen(msgspec.Struct, frozen=True):
    """A tensor as a kernel read or wrote it: ONNX Runtime's type name, such as ``"float16"``, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        count = 1
        for size in self.shape:
            count *= max(size, 0)
        return count


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One executed node."""

    name: str
    index: int
    op: str
    provider: str
    inputs: tuple[TensorSeen, ...] = ()
    outputs: tuple[TensorSeen, ...] = ()
    output_bytes: int = 0
    time_us: float = 0.0
    calls: int = 1
    runs: int = 1
    order: int = 0
    device_us: float | None = None
    device_kernels: tuple[DeviceKernel, ...] = ()

    @property
    def time(self) -> Time:
        """The device's where that is known, else the host's."""
        if self.device_us is None:
            return Time(value=self.time_us, unit="us", kind="wall", runs=self.runs)
        return Time(value=self.device_us, unit="us", kind="device", runs=self.runs)


class NodeSpan(NamedTuple):
    """One execution of one node in a counted run, by the clock of the profile."""

    name: str
    node: int
    op: str
    start_us: float
    end_us: float
    thread: int
    provider: str


class NodeProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile holds."""

    events: tuple[NodeEvent, ...]
    run_us: tuple[float, ...] = ()
    nodes_us: tuple[float, ...] = ()
    partial: bool = False
    notes: tuple[str, ...] = ()
    windows: tuple[tuple[float, float], ...] = ()
    spans: tuple[NodeSpan, ...] = ()

    def __iter__(self) -> Iterator[NodeEvent]:
        return iter(self.events)


def read_profile(path: str | os.PathLike[str]) -> NodeProfile:
    """Read a profile of ONNX Runtime.

    The first run is left out because it is cold, unless it is the only one. A file that was cut off (a crash, a full
    disk) gives what is whole in it, with `partial` set.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EngineError(
            f"cannot read the profile '{file}': {error.strerror or error}. Fix: make room on the disk, or name a "
            "folder that is writable, and observe again",
            engine="onnxruntime",
        ) from error
    records, cut = _records(text)
    if not records and not cut:
        return NodeProfile(events=(), partial=True, notes=("the profile holds no event",))
    foreign = any(not isinstance(r, dict) for r in records) or not any("cat" in r and "name" in r for r in records)
    if foreign:
        if cut and not records:
            return NodeProfile(events=(), partial=True, notes=("the profile is cut off before its first whole event",))
        raise EngineError(
            f"'{file}' is not a profile of ONNX Runtime: it must be a JSON list of events with 'cat' and 'name'. Give "
            "the file that `end_profiling()` returned.",
            engine="onnxruntime",
        )
    return _profile([r for r in records if "ts" in r and "dur" in r], cut)


def _records(text: str) -> tuple[list[Any], bool]:
    """Decode the list; of a list that is cut off, the leading whole items. The flag says that it was cut."""
    body = text.lstrip("\ufeff \t\r\n")
    if not body.startswith("["):
        return ([None], False) if body else ([], True)
    try:
        document = msgspec.json.decode(body)
        return (document, False) if isinstance(document, list) else ([None], False)
    except msgspec.DecodeError:
        pass
    records: list[Any] = []
    decoder, position = json.JSONDecoder(), 1
    while True:
        while position < len(body) and body[position] in " \t\r\n,":
            position += 1
        try:
            item, position = decoder.raw_decode(body, position)
        except ValueError:
            return records, True
        records.append(item)


def _profile(records: list[dict[str, Any]], cut: bool) -> NodeProfile:
    notes: list[str] = []
    partial = cut
    if cut:
        notes.append("the profile is cut off: only its whole events are used")
    if len(records) >= _EVENT_LIMIT:
        partial = True
        notes.append(f"ONNX Runtime keeps {_EVENT_LIMIT} events: later ones are lost. Observe fewer runs.")
    windows = sorted((r["ts"], r["ts"] + r["dur"]) for r in records if r["name"] == "model_run")
    nodes = [r for r in records if r.get("cat") == "Node" and str(r["name"]).endswith(_SUFFIX)]
    if not nodes:
        ends = tuple((float(start), float(end)) for start, end in windows)
        return NodeProfile(events=(), partial=True, notes=(*notes, "the profile holds no executed node"), windows=ends)
    if not windows:
        # The line that closes a run is written last: without one, the nodes seen are of an unfinished first run.
        windows = [(min(r["ts"] for r in nodes), max(r["ts"] + r["dur"] for r in nodes) + 1)]
        partial = True
        notes.append("no run is complete in the profile: the times are of one unfinished, cold run")
    elif len(windows) == 1:
        notes.append("the profile holds one run only, and a first run is cold: its times are too long")
    else:
        windows = windows[1:]
    starts = [w[0] for w in windows]
    per_run: list[list[dict[str, Any]]] = [[] for _ in windows]
    late = 0
    for record in nodes:
        at = bisect.bisect_right(starts, record["ts"]) - 1
        if at >= 0 and record["ts"] <= windows[at][1]:
            per_run[at].append(record)
        elif at == len(windows) - 1:
            late += 1
    if late:
        partial = True
        notes.append(f"the last run did not finish: {late} of its events are left out")
    return NodeProfile(
        events=_events(per_run),
        run_us=tuple(float(end - start) for start, end in windows),
        nodes_us=tuple(sum(_own_times(records)) for records in per_run),
        partial=partial,
        notes=tuple(notes),
        windows=tuple((float(start), float(end)) for start, end in windows),
        spans=tuple(_span(record) for records in per_run for record in records),
    )


def _key(record: dict[str, Any]) -> tuple[str, int, str]:
    args = record.get("args") or {}
    return (
        str(record["name"])[: -len(_SUFFIX)],
        _integer(args.get("node_index"), -1),
        str(args.get("op_name", "?")),
    )


def _span(record: dict[str, Any]) -> NodeSpan:
    provider = str((record.get("args") or {}).get("provider", ""))
    start = float(record["ts"])
    return NodeSpan(*_key(record), start, start + float(record["dur"]), _integer(record.get("tid"), 0), provider)


def _events(per_run: list[list[dict[str, Any]]]) -> tuple[NodeEvent, ...]:
    times: dict[tuple[str, int, str], list[float]] = {}
    calls: dict[tuple[str, int, str], int] = {}
    last: dict[tuple[str, int, str], dict[str, Any]] = {}
    for number, records in enumerate(per_run):
        own = _own_times(records)
        count: Counter[tuple[str, int, str]] = Counter()
        for record, value in zip(records, own, strict=True):
            key = _key(record)
            series = times.setdefault(key, [0.0] * len(per_run))
            series[number] += value
            count[key] += 1
            last[key] = record
        for key, n in count.items():
            calls[key] = max(calls.get(key, 0), n)
    ordered = sorted(last, key=lambda k: (last[k]["ts"], last[k]["ts"] + last[k]["dur"]))
    return tuple(_event(key, last[key], times[key], calls[key], order) for order, key in enumerate(ordered))


def _event(key: tuple[str, int, str], record: dict[str, Any], times: list[float], calls: int, order: int) -> NodeEvent:
    args = record.get("args") or {}
    return NodeEvent(
        name=key[0],
        index=key[1],
        op=key[2],
        provider=str(args.get("provider", "")),
        inputs=_tensors(args.get("input_type_shape")),
        outputs=_tensors(args.get("output_type_shape")),
        output_bytes=_integer(args.get("output_size"), 0),
        time_us=float(statistics.median(times)),
        calls=calls,
        runs=len(times),
        order=order,
    )


def _own_times(records: list[dict[str, Any]]) -> list[float]:
    """Return each record's time without what the nodes inside it took (a Loop's event spans those of its body)."""
    own = [float(r["dur"]) for r in records]
    order = sorted(range(len(records)), key=lambda i: (records[i]["ts"], -records[i]["dur"]))
    open_holders: list[int] = []
    for i in order:
        start, end, thread = records[i]["ts"], records[i]["ts"] + records[i]["dur"], records[i].get("tid")
        while open_holders and records[open_holders[-1]]["ts"] + records[open_holders[-1]]["dur"] <= start:
            open_holders.pop()
        for holder in reversed(open_holders):
            outer = records[holder]
            if outer.get("tid") == thread and end <= outer["ts"] + outer["dur"]:
                own[holder] = max(0.0, own[holder] - float(records[i]["dur"]))
                break
        if (records[i].get("args") or {}).get("op_name") in _HOLDERS:
            open_holders.append(i)
    return own


def _tensors(value: Any) -> tuple[TensorSeen, ...]:
    tensors = []
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            for dtype, shape in item.items():
                tensors.append(TensorSeen(str(dtype), tuple(int(s) for s in shape) if isinstance(shape, list) else ()))
    return tuple(tensors)


def _integer(value: Any, default: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


class Devices:
    """A ``with`` block in which devices are watched; on the CPU nothing is done.

    What goes wrong is noted, and the pass goes on without the times of devices.
    """

    def __init__(self, device: str) -> None:
        self._recorder = DeviceRecorder() if device.startswith("cuda") else None
        self._recording: DeviceRecording | None = None
        self._began_ns: int | None = None
        self._notes: list[str] = []

    def _enter(self) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.start()
        except XpuRuntimeError as error:
            self._recorder = None
            self._notes.append(f"what the device did is not seen: {error}")

    def _exit(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._recorder is None:
            return
        try:
            self._recording = self._recorder.stop()
        except XpuRuntimeError as failed:
            self._notes.append(f"what the device did is not seen: {failed}")

    def _abandon(self) -> None:
        if self._recorder is not None:
            self._recorder.abandon()

    __enter__ = _core.guarded(_enter, _abandon)
    __exit__ = _core.guarded(_exit, _abandon)

    def begin_of(self, session: Any) -> None:
        """Ask a session when the clock of its profile began; before its profile is ended."""
        read = getattr(session, "get_profiling_start_time_ns", None)
        self._began_ns = None if read is None else int(read())

    def marks(self, profile: NodeProfile) -> list[Mark]:
        """Return the nodes of the counted runs, for a trace; none where nobody knows when the profile began."""
        began = self._began_ns
        if began is None:
            return []
        return [
            Mark(
                "nodes of ONNX Runtime",
                span.name,
                began + round(span.start_us * 1000),
                began + round(span.end_us * 1000),
                span.thread,
                {"op": span.op, "provider": span.provider},
            )
            for span in profile.spans
        ]

    def added_to(self, profile: NodeProfile) -> DeviceTimes:
        """Return a profile with what devices did, or as it is."""
        recording = self._recording
        notes = list(self._notes)
        if recording is not None:
            notes += recording.notes
            if self._began_ns is None:
                notes.append(
                    "this ONNX Runtime does not say when its profile began: device work is attributed to no node"
                )
            elif recording.source in ("cupti", "kineto"):
                timed = with_device_times(profile, recording, self._began_ns)
                return timed._replace(notes=(*notes, *timed.notes))
        return DeviceTimes(profile, (), (), (), tuple(notes))
