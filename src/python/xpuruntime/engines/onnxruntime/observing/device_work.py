# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attribution of device work to the nodes of ONNX Runtime that started it, by when the host launched it."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from xpuruntime.evidence.kernels.names import parse_kernel_name
from xpuruntime.evidence.records import BESIDE, Boundary, DeviceKernel, Time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, NodeProfile, NodeSpan
    from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall

__all__ = ["DeviceTimes", "with_device_times"]

_CPU = "CPUExecutionProvider"
#: What counts as work of a device.
_KINDS = ("kernel", "copy", "fill")


class DeviceTimes(NamedTuple):
    """A profile with the times of devices."""

    profile: NodeProfile
    boundaries: tuple[Boundary, ...]
    device_us: tuple[float, ...]
    in_nodes_us: tuple[float, ...]
    notes: tuple[str, ...]


class _Piece(NamedTuple):
    """A piece of work, and the run in which it was started."""

    run: int
    work: DeviceWork


def with_device_times(profile: NodeProfile, recording: DeviceRecording, began_ns: int) -> DeviceTimes:
    """Return a profile with what devices did for each node."""
    windows = [(began_ns + start * 1000, began_ns + end * 1000) for start, end in profile.windows]
    owners, outside, waits = _sorted(profile.spans, windows, recording, began_ns)
    count = len(windows)
    events = tuple(_event(one, owners.get((one.name, one.index, one.op), []), count) for one in profile.events)
    totals, within = [0.0] * count, [0.0] * count
    for pieces in owners.values():
        for piece in pieces:
            totals[piece.run] += piece.work.us
            within[piece.run] += piece.work.us
    for piece in outside:
        totals[piece.run] += piece.work.us
    notes = []
    if sum(totals):
        text = f"of {statistics.median(totals):.0f} us of device time in a run, {sum(within) / sum(totals):.0%}"
        notes.append(f"{text} is work that nodes started")
    boundaries = (*_copies(outside, count), *_other(outside, count), *_waits(waits, count))
    found = msgspec.structs.replace(profile, events=events)
    return DeviceTimes(found, boundaries, tuple(totals), tuple(within), tuple(notes))


def _sorted(
    spans: Sequence[NodeSpan], windows: Sequence[tuple[float, float]], recording: DeviceRecording, began_ns: int
) -> tuple[dict[tuple[str, int, str], list[_Piece]], list[_Piece], list[_Piece]]:
    """Return the work of each node, the work of runs outside of nodes, and what the host waited for."""
    calls: dict[int, HostCall] = {}
    for call in recording.calls:
        known = calls.get(call.correlation)
        if known is None or call.start_ns < known.start_ns:  # the runtime's, around the driver's
            calls[call.correlation] = call
    ordered = sorted(spans, key=lambda one: (one.start_us, -one.end_us))
    starts = [began_ns + one.start_us * 1000 for one in ordered]
    opened = [start for start, _ in windows]
    owners: dict[tuple[str, int, str], list[_Piece]] = defaultdict(list)
    outside: list[_Piece] = []
    waits: list[_Piece] = []
    for work in recording.work:
        started = calls.get(work.correlation) if work.correlation else None
        at = started.start_ns if started is not None else work.start_ns if work.kind == "wait" else None
        run = bisect_right(opened, at) - 1 if at is not None else -1
        if at is None or run < 0 or at > windows[run][1]:
            continue
        if work.kind == "wait":
            waits.append(_Piece(run, work))
            continue
        if work.kind not in _KINDS:
            continue
        span = _innermost(ordered, starts, at, began_ns)
        if span is None:
            outside.append(_Piece(run, work))
        else:
            owners[span.name, span.node, span.op].append(_Piece(run, work))
    return owners, outside, waits


def _innermost(ordered: Sequence[NodeSpan], starts: Sequence[float], at: float, began_ns: int) -> NodeSpan | None:
    """Return the node that was running at a moment; where nodes hold nodes, the inner one."""
    index = bisect_right(starts, at) - 1
    # Nodes are short and hold others only in control flow: few steps back.
    for place in range(index, max(-1, index - 64), -1):
        if at <= began_ns + ordered[place].end_us * 1000:
            return ordered[place]
    return None


def _event(event: NodeEvent, pieces: list[_Piece], runs: int) -> NodeEvent:
    if event.provider == _CPU and not pieces:
        return event
    kernels = _kernels(pieces, runs)
    per_run = [0.0] * runs
    for piece in pieces:
        per_run[piece.run] += piece.work.us
    return msgspec.structs.replace(event, device_us=float(statistics.median(per_run)), device_kernels=kernels)


def _kernels(pieces: Iterable[_Piece], runs: int) -> tuple[DeviceKernel, ...]:
    groups: dict[tuple[Literal["kernel", "copy", "fill"], str], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        work = piece.work
        name = f"{work.name} {work.source} -> {work.destination}" if work.kind == "copy" else work.name
        groups[work.kind, name].append(piece)  # type: ignore[index]  # of the three kinds, see _sorted
    found = []
    for (kind, name), held in groups.items():
        per_run = [0.0] * runs
        for piece in held:
            per_run[piece.run] += piece.work.us
        said = parse_kernel_name(name)
        found.append(
            DeviceKernel(
                name=name,
                kind=kind,
                count=len(held) / runs,
                us=float(statistics.median(per_run)),
                runs=runs,
                bytes=sum(piece.work.bytes for piece in held) // runs,
                tensor_cores=said.tensor_cores,
                precision=said.precision,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.us))


def _boundary(
    kind: Literal["copy", "sync"], where: str, pieces: list[_Piece], runs: int, of: Literal["device", "wall"]
) -> Boundary:
    per_run = [0.0] * runs
    for piece in pieces:
        per_run[piece.run] += piece.work.us
    size = sum(piece.work.bytes for piece in pieces) // runs
    return Boundary(
        kind=kind,
        where=where,
        count=max(1, round(len(pieces) / runs)),
        bytes=size if kind == "copy" else None,
        time=Time(value=float(statistics.median(per_run)), unit="us", kind=of, runs=runs),
    )


def _copies(outside: Iterable[_Piece], runs: int) -> list[Boundary]:
    groups: dict[str, list[_Piece]] = defaultdict(list)
    for piece in outside:
        work = piece.work
        if work.kind == "copy":
            groups[f"{work.source or '?'} -> {work.destination or '?'}, {BESIDE}"].append(piece)
    return [_boundary("copy", where, held, runs, "device") for where, held in groups.items()]


def _other(outside: Iterable[_Piece], runs: int) -> list[Boundary]:
    held = [piece for piece in outside if piece.work.kind == "fill"]
    return [_boundary("copy", f"fills {BESIDE}", held, runs, "device")] if held else []


def _waits(waits: Iterable[_Piece], runs: int) -> list[Boundary]:
    groups: dict[str, list[_Piece]] = defaultdict(list)
    for piece in waits:
        groups[piece.work.name].append(piece)
    return [_boundary("sync", where, held, runs, "wall") for where, held in groups.items()]
