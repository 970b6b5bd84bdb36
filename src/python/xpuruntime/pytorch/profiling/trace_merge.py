# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`merge_trace`: PyTorch's chrome trace and what xpuruntime did, in one file, on one clock.

The form is the Trace Event Format, in which PyTorch writes its trace: complete events (``X``), metadata (``M``) and
flows (``s`` and ``f``), times in microseconds after ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.evidence.traces.trace_file import write_trace
from xpuruntime.pytorch.explanation.summary_builder import decision_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls
    from xpuruntime.runtime.profiler import Mark

__all__ = ["merge_trace"]

#: Our process in the trace. Those of the system are far below, and PyTorch numbers devices from zero.
_PROCESS = 1_000_000_000
_CATEGORY = "xpuruntime"
_BEGIN = ("cudaStreamBeginCapture", "cuStreamBeginCapture")
_END = ("cudaStreamEndCapture", "cuStreamEndCapture")


def merge_trace(
    raw: Path, target: Path, kinds: Iterable[RecordedCalls], decisions: Sequence[Decision], marks: Iterable[Mark]
) -> None:
    """Write one trace."""
    try:
        document = _read(raw.read_bytes())
    except (OSError, ValueError) as error:
        msg = (
            f"cannot write the trace to '{target}': the one that PyTorch has written beside it is not whole ({error}). "
            "Give a path in a folder that has free space."
        )
        raise InputError(msg) from error
    events = document["traceEvents"]
    events += _EventMaker(document.get("baseTimeNanoseconds", 0), events).events(kinds, decisions, marks)
    write_trace(target, document)


def _read(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        found = json.loads(data)  # which also takes NaN, as PyTorch may write it
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError("it has no traceEvents")
    return found


class _EventMaker:
    """Makes xpuruntime's events of a trace."""

    def __init__(self, base: int, events: Sequence[dict[str, Any]]) -> None:
        self._base = base
        self._theirs = events
        self._made: list[dict[str, Any]] = []
        self._tracks: dict[tuple[str, int], int] = {}

    def events(
        self, kinds: Iterable[RecordedCalls], decisions: Sequence[Decision], marks: Iterable[Mark]
    ) -> list[dict[str, Any]]:
        ranges: dict[tuple[str, Any], list[tuple[float, Any]]] = defaultdict(list)
        for event in self._theirs:
            if event.get("cat") == "user_annotation" and event["name"].startswith(_CATEGORY + " "):
                ranges[(event["name"], event["tid"])].append((event["ts"], event["pid"]))
        for found in ranges.values():
            found.sort(key=lambda one: one[0])
        for seen in kinds:
            if seen.count:
                self._decision(seen, decision_of(seen, decisions), ranges.get((seen.label, seen.thread), []))
        for mark in marks:
            start, end = self._at(mark.start_ns), self._at(mark.end_ns)
            self._slice(mark.track, mark.thread, mark.name, start, end - start, mark.details)
        self._captures()
        return [*self._names(), *self._made]

    def _at(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def _decision(self, seen: RecordedCalls, decision: Decision | None, ranges: list[tuple[float, Any]]) -> None:
        start = self._at(seen.first_ns)
        index = bisect_left(ranges, start, key=lambda one: one[0])
        near = min(ranges[max(0, index - 1) : index + 1], key=lambda one: abs(one[0] - start), default=None)
        end = start + seen.first_duration_ns / 1000
        if near is not None:
            # Clocks may differ by some microseconds, and an arrow must not go back in time.
            start, end = min(start, near[0]), max(end, near[0])
        kernel = seen.kernel if decision is None else decision.kernel
        details: dict[str, Any] = {
            "operator": seen.operator,
            "requested": list(seen.asked),
            "by": seen.source,
            "resolved": kernel,
            "status": seen.status,
            "shapes": [list(shape) for shape in seen.shapes],
            "dtypes": list(seen.dtypes),
            "device": seen.device,
            "module": seen.module,
            "phase": seen.phase,
            "calls": seen.count,
        }
        if seen.reason:
            details["reason"] = seen.reason
        if decision is not None:
            details["decision"] = decision.text
        track = self._slice("decisions", seen.thread, f"{seen.op}: {kernel}", start, end - start, details)
        if near is not None:
            flow = {"cat": _CATEGORY, "name": "decision", "id": seen.number + 1}
            self._made.append({"ph": "s", **flow, "pid": _PROCESS, "tid": track, "ts": start})
            self._made.append({"ph": "f", "bp": "e", **flow, "pid": near[1], "tid": seen.thread, "ts": near[0]})

    def _captures(self) -> None:
        """Draw each capture of a CUDA graph, from the calls that began and ended it."""
        begun: dict[Any, float] = {}
        calls = [event for event in self._theirs if str(event.get("name", "")).startswith((*_BEGIN, *_END))]
        for event in sorted(calls, key=lambda one: one["ts"]):
            thread = event["tid"]
            if event["name"].startswith(_BEGIN):
                begun[thread] = event["ts"]
            elif thread in begun:
                start = begun.pop(thread)
                self._slice(
                    "captures", thread, "capture of a CUDA graph", start, event["ts"] + event["dur"] - start, {}
                )

    def _slice(self, track: str, thread: int, name: str, start: float, duration: float, details: dict[str, Any]) -> int:
        tid = self._tracks.setdefault((track, thread), len(self._tracks) + 1)
        self._made.append(
            {
                "ph": "X",
                "cat": _CATEGORY,
                "name": name,
                "pid": _PROCESS,
                "tid": tid,
                "ts": start,
                "dur": max(0.0, duration),
                "args": details,
            }
        )
        return tid

    def _names(self) -> list[dict[str, Any]]:
        """Return what names the process of xpuruntime and its tracks."""
        first = min((event["ts"] for event in self._made), default=0.0)

        def named(what: str, tid: int, **args: Any) -> dict[str, Any]:
            return {"ph": "M", "name": what, "pid": _PROCESS, "tid": tid, "ts": first, "args": args}

        found = [named("process_name", 0, name="xpuruntime"), named("process_sort_index", 0, sort_index=-1)]
        for (track, thread), tid in self._tracks.items():
            found.append(named("thread_name", tid, name=f"{track} (thread {thread})"))
            found.append(named("thread_sort_index", tid, sort_index=tid))
        return found
