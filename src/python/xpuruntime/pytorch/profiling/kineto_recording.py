# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's profiler, which runs once in a process, and what it saw of devices and operators as a recording."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.autograd import DeviceType

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.pytorch import _private_api
from xpuruntime.runtime.profiler import DeviceWork, HostCall, Range, WorkKind

if TYPE_CHECKING:
    from xpuruntime.runtime.profiler import DeviceRecording

#: CUPTI's records of calls into the CUDA runtime and driver; PyTorch 2.11 gives them no type of their own.
_API = re.compile(r"(cuda|cu|hip)[A-Z]")
_COPY = re.compile(r"Memcpy (\w)to(\w)(?: \((\w+) -> (\w+)\))?")
_FILL = re.compile(r"Memset(?: \((\w+)\))?")
_WAIT = ("Stream Sync", "Context Sync", "Event Sync", "Stream Wait Event")
_MEMORY = {"Pageable": "host (pageable)", "Pinned": "host (pinned)", "Device": "device", "Managed": "managed"}


class KinetoRecording:
    """Runs PyTorch's profiler."""

    def __init__(self, limit: int) -> None:
        refuse_a_second("a recording of devices")
        self._limit = limit
        self._profiler = Profiler()

    def start(self) -> None:
        """Start it; see `Profiler.start`."""
        self._profiler.start()

    def stop(self) -> None:
        """Wait for every device that this process uses, and stop."""
        try:
            for index in range(torch.cuda.device_count()):
                if _private_api.has_cuda_context(index):
                    torch.cuda.synchronize(index)
        finally:
            self._profiler.stop()

    def abandon(self) -> None:
        """See `Profiler.abandon`."""
        self._profiler.abandon()

    def added_to(self, recording: DeviceRecording) -> DeviceRecording:
        """Return a recording of ranges with the work of devices and PyTorch's operators added."""
        work, calls, operators, dropped = read(self._profiler.events(), self._limit)
        work = with_bytes(work, self._sizes()) if any(step.kind in ("copy", "fill") for step in work) else work
        first = max((range_.id for range_ in recording.ranges), default=0) + 1
        nested = nest(operators, first)
        ranges = [*recording.ranges, *nested]
        placed = assign_ranges(work, calls, recording.ranges)
        notes = recording.notes
        if dropped:
            notes = (*notes, f"{dropped} records are lost: more came than are kept. Profile less, or raise the limit")
        return msgspec.structs.replace(
            recording,
            source="kineto",
            notes=notes,
            ranges=tuple(sorted(ranges, key=lambda range_: range_.start_ns)),
            work=tuple(placed),
            calls=tuple(calls),
            dropped=recording.dropped + dropped,
        )

    def _sizes(self) -> dict[int, list[tuple[float, int]]]:
        """Return what the trace that PyTorch writes has of copies and fills, and its events have not: their bytes."""
        with ScratchFolder("profile") as folder:
            path = Path(folder) / "trace.json"
            self._profiler.torch.export_chrome_trace(str(path))
            return sizes(msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents)


class _Trace(msgspec.Struct):
    """The part of a trace that is read."""

    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name


def sizes(events: Iterable[dict[str, Any]]) -> dict[int, list[tuple[float, int]]]:
    """Return correlation number to start and bytes of the copies and fills of a trace, in their order."""
    sizes: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            args = event.get("args", {})
            sizes.setdefault(int(args.get("correlation", 0)), []).append((event["ts"], int(args.get("bytes", 0))))
    for held in sizes.values():
        held.sort()
    return sizes


def with_bytes(work: Iterable[DeviceWork], known: dict[int, list[tuple[float, int]]]) -> list[DeviceWork]:
    """Return work with the bytes of copies and fills; a call that made several has them in their order."""
    waiting = {number: iter(held) for number, held in known.items()}
    result = []
    for step in work:
        if step.kind in ("copy", "fill"):
            _, size = next(waiting.get(step.correlation, iter(())), (0.0, step.bytes))
            result.append(step._replace(bytes=size))
        else:
            result.append(step)
    return result


def read(events: Iterable[Any], limit: int) -> tuple[list[DeviceWork], list[HostCall], list[Range], int]:
    """Sort events of kineto's into device work, calls of the host, and operators, which are not nested yet."""
    work: list[DeviceWork] = []
    calls: list[HostCall] = []
    operators: list[Range] = []
    dropped = 0
    for event in events:
        if event.is_hidden_event():
            continue
        name, start = event.name(), event.start_ns()
        end = start + event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            if event.is_user_annotation():
                continue
            if len(work) < limit:
                work.append(_work(event, name, start, end))
            else:
                dropped += 1
        elif _API.match(name):
            if len(calls) < limit:
                calls.append(HostCall(name, event.device_resource_id(), start, end, event.correlation_id()))
            else:
                dropped += 1
        elif name != "[memory]" and not event.is_async() and event.start_thread_id() == event.end_thread_id():
            if len(operators) < limit:
                operators.append(Range(0, 0, name, "torch", event.device_resource_id(), start, end))
            else:
                dropped += 1
    work.sort(key=lambda step: step.start_ns)
    return work, calls, operators, dropped


def _work(event: Any, name: str, start: int, end: int) -> DeviceWork:
    kind: WorkKind = "kernel"
    source = destination = ""
    if copy := _COPY.match(name):
        kind = "copy"
        source, destination = (_MEMORY.get(word or "", word or "") for word in copy.group(3, 4))
        name = "copy"
    elif fill := _FILL.match(name):
        kind, name = "fill", "fill"
        destination = _MEMORY.get(fill.group(1) or "", fill.group(1) or "")
    elif name.startswith(_WAIT):
        kind = "wait"
    return DeviceWork(
        kind,
        name,
        event.device_index(),
        event.device_resource_id(),
        start,
        end,
        correlation=event.correlation_id(),
        source=source,
        destination=destination,
    )


def nest(operators: list[Range], first: int) -> list[Range]:
    """Return operators with numbers, and with what each ran in."""
    operators.sort(key=lambda operator: (operator.thread, operator.start_ns, -operator.end_ns))
    ranges: list[Range] = []
    open_: list[Range] = []
    for number, range_ in enumerate(operators, first):
        while open_ and (open_[-1].thread != range_.thread or open_[-1].end_ns < range_.end_ns):
            open_.pop()
        numbered = range_._replace(id=number, parent=open_[-1].id if open_ else 0)
        open_.append(numbered)
        ranges.append(numbered)
    return ranges


def assign_ranges(work: list[DeviceWork], calls: list[HostCall], ranges: Iterable[Range]) -> list[DeviceWork]:
    """Say in which range each piece of work was started: the innermost of its thread around the call."""
    threads: dict[int, list[Range]] = {}
    for around in ranges:
        threads.setdefault(around.thread, []).append(around)
    starts = {thread: [around.start_ns for around in held] for thread, held in threads.items()}
    by_id = {around.id: around for held in threads.values() for around in held}
    call_by_correlation = {call.correlation: call for call in calls}
    placed = []
    for step in work:
        call = call_by_correlation.get(step.correlation) if step.correlation else None
        held = threads.get(call.thread) if call is not None else None
        if call is None or held is None:
            placed.append(step)
            continue
        index = bisect_right(starts[call.thread], call.start_ns) - 1
        range_ = held[index] if index >= 0 else None
        while range_ is not None and range_.end_ns < call.start_ns:
            range_ = by_id.get(range_.parent)
        placed.append(step if range_ is None else step._replace(range=range_.id))
    return placed


def refuse_a_second(what: str) -> None:
    """Refuse to start a profiler while one runs: there is one of PyTorch's per process, and a second would crash it."""
    if _private_api.profiler_flag() or _private_api.profiler_enabled():
        msg = (
            f"{what} needs PyTorch's profiler, and one runs already: one profiler runs at a time. Leave the block of "
            "torch.profiler, xpuruntime.pytorch.profile or explain() around it first, or do not nest them"
        )
        raise InputError(msg)


def _default_activities() -> list[Any]:
    """Return what is to be recorded: the CPU, and CUDA where there is a device."""
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU, activity.CUDA] if torch.cuda.is_available() else [activity.CPU]


class Profiler:
    """`torch.profiler.profile`, which holds everything between `start` and `stop`, kernels that are under way included.

    As a context manager it starts, stops, and abandons itself.
    """

    def __init__(self, activities: Iterable[Any] | None = None, **options: Any) -> None:
        # Else PyTorch 2.13 prints a line for each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        chosen = _default_activities() if activities is None else list(activities)
        self.torch = torch.profiler.profile(activities=chosen, **options)
        self._runs = False
        self._filters: Any = None

    def start(self) -> None:
        """Start it; kernels that were started before are waited for. `abandon` it where this is interrupted."""
        _finish_kernels()
        self._filters = warnings.filters
        self._runs = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.torch.start()

    def stop(self) -> None:
        """Wait for the kernels that are under way, and stop. `abandon` it where this is interrupted."""
        try:
            _finish_kernels()
        finally:
            self._filters = warnings.filters
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.torch.stop()
        self._runs = False

    def abandon(self) -> None:
        """Leave PyTorch without a profiler, at whatever point `start` or `stop` was interrupted. Idempotent."""
        if not self._runs:
            return
        if self._filters is not None and warnings.filters is not self._filters:
            warnings.filters = self._filters
            warnings._filters_mutated()  # type: ignore[attr-defined]
        prepared: Any = self.torch.profiler
        if prepared is not None and not _private_api.profiler_enabled():
            # PyTorch 2.11 prepares no second one where the first was prepared and never enabled, and says so.
            with contextlib.suppress(RuntimeError):
                _private_api.prepare_profiler(prepared)
            _private_api.enable_profiler(prepared)
        if _private_api.profiler_enabled():
            _private_api.disable_profiler()
        _private_api.set_profiler_flag(False)
        self._runs = False

    def _enter(self) -> Profiler:
        self.start()
        return self

    def _exit(self, *_: object) -> None:
        self.stop()

    __enter__ = _core.guarded(_enter, abandon)
    __exit__ = _core.guarded(_exit, abandon)

    def events(self) -> list[Any]:
        """Return everything that was recorded, as kineto has it; times are nanoseconds since the epoch."""
        profiler = self.torch.profiler
        events: list[Any] = profiler.kineto_results.events()
        return events


def _finish_kernels() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
