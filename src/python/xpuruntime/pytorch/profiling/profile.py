# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`profile`: device and host in one trace."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from xpuruntime import _core
from xpuruntime.argument_types import FLAG, check_types
from xpuruntime.errors import InputError
from xpuruntime.evidence.profile import cannot_write, check_trace, trace_path, write_trace
from xpuruntime.files.writing import staging
from xpuruntime.ops.decision_log import decisions
from xpuruntime.policies.files import dumps
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.explanation.call_recorder import CallRecorder
from xpuruntime.pytorch.explanation.explain import Watch, served_since
from xpuruntime.pytorch.explanation.summary import decision_of
from xpuruntime.pytorch.profiling.kineto_recording import Profiler, refuse_a_second
from xpuruntime.runtime.profiler import Marks, RecordedBlock, record_marks, warn_beside

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls
    from xpuruntime.runtime.profiler import Mark

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
            "Fix: give a path in a folder that has free space"
        )
        raise InputError(msg) from error
    events = document["traceEvents"]
    events += _EventMaker(document.get("baseTimeNanoseconds", 0), events).events(kinds, decisions, marks)
    write_trace(target, document)


def _read(data: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        document = json.loads(data)  # which also takes NaN, as PyTorch may write it
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError("it has no traceEvents")
    return document


class _EventMaker:
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
        for range_ in ranges.values():
            range_.sort(key=lambda range_event: range_event[0])
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
        index = bisect_left(ranges, start, key=lambda range_: range_[0])
        near = min(ranges[max(0, index - 1) : index + 1], key=lambda range_: abs(range_[0] - start), default=None)
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
        begun: dict[Any, float] = {}
        calls = [event for event in self._theirs if str(event.get("name", "")).startswith((*_BEGIN, *_END))]
        for event in sorted(calls, key=lambda call: call["ts"]):
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
        first = min((event["ts"] for event in self._made), default=0.0)

        def named(what: str, tid: int, **args: Any) -> dict[str, Any]:
            return {"ph": "M", "name": what, "pid": _PROCESS, "tid": tid, "ts": first, "args": args}

        names = [named("process_name", 0, name="xpuruntime"), named("process_sort_index", 0, sort_index=-1)]
        for (track, thread), tid in self._tracks.items():
            names.append(named("thread_name", tid, name=f"{track} (thread {thread})"))
            names.append(named("thread_sort_index", tid, sort_index=tid))
        return names


class profile(RecordedBlock["_Watch"]):  # noqa: N801 - used like a function
    """Run PyTorch's profiler over a ``with`` block, and write one trace with the decisions of xpuruntime.

    Parameters
    ----------
    export_chrome_trace : path, optional
        Where to write the trace: a file that ends in ``.json``, or ``.json.gz`` for a compressed one. It opens in
        Perfetto and in ``chrome://tracing``. An older file is replaced as a whole.
    activities : iterable of torch.profiler.ProfilerActivity, optional
        Default: the CPU, and CUDA where there is a device.
    record_shapes, profile_memory, with_stack : bool
        As for `torch.profiler.profile`.

    Returns
    -------
    torch.profiler.profile
        From ``with``: ``prof.key_averages()`` and the rest work as ever. After a trace was written,
        ``prof.export_chrome_trace`` does not: PyTorch writes each trace once.

    Raises
    ------
    InputError
        When the block is entered: the trace cannot be written there, or a profiler of PyTorch's runs already. After the
        block: the trace could not be written, as on a full disk.

    Notes
    -----
    Calls that the active policy decides one by one have a range of the form ``xpuruntime matmul cublas.cublasLt
    layers.3.attn``. Under a process of its own named ``xpuruntime`` are the decisions, each drawn with the first call
    that it served and with an arrow to its range, CUDA graphs while they are captured, and what other parts of
    xpuruntime mark, such as tuning. The policy is in the metadata as ``xpuruntime_policy``.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> with xrt_torch.profile() as prof:
    ...     product = torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    >>> "aten::mm" in {event.key for event in prof.key_averages()}
    True
    """

    def __init__(
        self,
        export_chrome_trace: str | os.PathLike[str] | None = None,
        *,
        activities: Iterable[Any] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._target = None if export_chrome_trace is None else trace_path(export_chrome_trace)
        self._activities = None if activities is None else _activities(activities)
        self._options = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        check_types(dict.fromkeys(self._options, FLAG), self._options)

    def _check(self) -> None:
        if self._target is not None:
            check_trace(self._target)
        refuse_a_second("profile()")

    def _enter(self) -> Any:
        self._recorder = CallRecorder(_range)
        self._marks = Marks()
        active = active_policy()
        self._policy = None if active is None else active.policy
        self._before = decisions()
        profiler = Profiler(self._activities, **self._options)
        self._start(_Watch(self._recorder, profiler, self._marks))
        return profiler.torch

    def _exit(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        watch = self._running()
        with warn_beside(error):
            text = "null" if self._policy is None else dumps(self._policy.to_dict(), "json")
            try:
                watch.profiler.torch.add_metadata_json("xpuruntime_policy", text)
                watch.stop()
            finally:
                self._abandon()
            if self._target is not None:
                self._write(watch.profiler, self._target)

    __enter__ = _core.guarded(_enter, RecordedBlock._abandon, _check)
    __exit__ = _core.guarded(_exit, RecordedBlock._abandon)

    def _write(self, profiler: Profiler, target: Path) -> None:
        with staging(target) as folder:
            raw = folder / "trace.json"
            try:
                profiler.torch.export_chrome_trace(str(raw))
            except (OSError, RuntimeError) as error:
                raise cannot_write(target, error) from error
            merge_trace(raw, target, self._recorder.kinds, served_since(self._before), self._marks.taken)


class _Watch(Watch):
    def __init__(self, recorder: CallRecorder, profiler: Profiler, marks: Marks) -> None:
        super().__init__(recorder, profiler)
        self._marks = marks

    def _install(self) -> None:
        module_paths.require()
        self._undo.append(module_paths.release)

    def _record(self) -> None:
        before = record_marks(self._marks)
        self._undo.append(lambda: record_marks(before))
        super()._record()


def _activities(stated: Any) -> list[Any]:
    known = torch.profiler.ProfilerActivity
    activities = list(stated) if isinstance(stated, Iterable) and not isinstance(stated, (str, bytes)) else [stated]
    wrong = next((activity for activity in activities if not isinstance(activity, known)), None)
    if wrong is not None:
        msg = f"activities has {wrong!r:.60}: give a list of torch.profiler.ProfilerActivity"
        raise TypeError(msg)
    if not activities:
        raise InputError("activities is empty: name what to record, such as [torch.profiler.ProfilerActivity.CPU]")
    return activities


def _range(seen: RecordedCalls) -> Any:
    return torch.profiler.record_function(seen.label)
