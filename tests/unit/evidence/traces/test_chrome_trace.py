# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A recording in the Trace Event Format: made-up records, held to what Perfetto reads."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import Any

from xpuruntime.evidence.profile import chrome_trace
from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall, Mark, Range

T0 = 1_700_000_000_000_000_000
DEVICE, ENGINES = 1_000_000_000, 2_000_000_000


def recording(**changed: Any) -> DeviceRecording:
    """Two ranges of a thread, a kernel and a copy of a graph, a wait and an allocation."""
    given: dict[str, Any] = {
        "source": "cupti",
        "notes": ("a note",),
        "start_ns": T0,
        "end_ns": T0 + 100_000,
        "ranges": (
            Range(1, 0, "outer", "range", 11, T0 + 1000, T0 + 90_000),
            Range(2, 1, "inner", "run", 11, T0 + 2000, T0 + 50_000, finished=False),
        ),
        "calls": (
            HostCall("cudaGraphLaunch", 11, T0 + 3000, T0 + 5000, 7),
            HostCall("cudaMemcpyAsync", 0, T0 + 6000, T0 + 7000, 8),
        ),
        "work": (
            DeviceWork("kernel", "gemm", 0, 3, T0 + 10_000, T0 + 20_000, range=2, correlation=7, graph=5),
            DeviceWork("kernel", "relu", 0, 3, T0 + 20_000, T0 + 25_000, range=2, correlation=7, graph=5),
            DeviceWork(
                "copy", "copy", 1, 4, T0 + 30_000, T0 + 34_000, correlation=8, bytes=8000,
                source="host (pinned)", destination="device",
            ),
            DeviceWork("wait", "the host waits for a stream", 0, 3, T0 + 40_000, T0 + 60_000, correlation=7),
            DeviceWork("allocation", "allocation", 0, 0, T0 + 41_000, T0 + 41_000, bytes=64, destination="device"),
            DeviceWork("kernel", "from nowhere", 0, 3, T0 + 70_000, T0 + 71_000),
        ),
    }  # fmt: skip
    return DeviceRecording(**{**given, **changed})


def check(trace: dict[str, Any]) -> None:
    """Hold a trace to the format: what a slice has, what nests on a track, and where arrows begin and end."""
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMisf", event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event["ts"], (int, float)), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert isinstance(event["name"], str), event
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for ends in flows.values():
        assert [one["ph"] for one in ends] == ["s", "f"], ends
        assert ends[0]["ts"] <= ends[1]["ts"], ends
        for one in ends:
            held = slices[one["pid"], one["tid"]]
            assert any(start <= one["ts"] <= end for start, end in held), one
    for key, held in slices.items():
        open_: list[float] = []
        for start, end in sorted(held, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1] <= start + 1e-6:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-6, f"{key}: two slices overlap and neither holds the other"
            open_.append(end)


def of(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        traceevent
        for traceevent in trace["traceEvents"]
        if all(traceevent.get(key) == value for key, value in wanted.items())
    ]


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in of(trace, ph="M", name=what)}


def test_a_trace_is_well_formed_and_has_everything() -> None:
    trace = json.loads(json.dumps(chrome_trace(recording(), metadata={"model": "m"})))
    check(trace)
    assert trace["baseTimeNanoseconds"] == T0
    assert trace["metadata"] == {"source": "cupti", "notes": ["a note"], "model": "m"}
    [inner] = of(trace, name="inner")
    assert (inner["pid"], inner["tid"], inner["ts"], inner["dur"]) == (os.getpid(), 11, 2.0, 48.0)
    assert inner["args"] == {"range": 2, "unfinished": True}
    [kernel] = of(trace, name="gemm")
    assert (kernel["pid"], kernel["tid"], kernel["ts"], kernel["dur"]) == (DEVICE, 3, 10.0, 10.0)
    assert kernel["args"] == {"correlation": 7, "stream": 3, "graph": 5, "started in": "inner"}
    [copy] = of(trace, name="copy", ph="X")
    assert copy["pid"] == DEVICE + 1
    assert copy["args"] == {
        "correlation": 8, "stream": 4, "bytes": 8000, "GB/s": 2.0, "source": "host (pinned)", "destination": "device",
    }  # fmt: skip
    [allocation] = of(trace, cat="allocation")
    assert (allocation["ph"], allocation["args"]["bytes"]) == ("i", 64)


def test_processes_and_tracks_have_names() -> None:
    trace = chrome_trace(recording(), [Mark("tuning", "matmul", T0 + 1, T0 + 2, 11, {})])
    host = os.getpid()
    assert set(names(trace, "process_name").items()) == {
        ((host, 0), "host"),
        ((DEVICE, 0), "cuda:0"),
        ((DEVICE + 1, 0), "cuda:1"),
        ((ENGINES, 0), "engines and xpuruntime"),
    }
    tracks = names(trace, "thread_name")
    assert tracks[host, 11] == "thread 11"
    assert tracks[host, 0] == "threads without ranges"
    assert tracks[DEVICE, 3] == "stream 3"
    assert tracks[ENGINES, 1] == "tuning"
    drawn = {(one["pid"], one["tid"]) for one in of(trace, ph="X")}
    assert drawn <= set(tracks)


def test_each_piece_that_a_graph_started_has_an_arrow_of_its_own() -> None:
    trace = chrome_trace(recording())
    starts, ends = of(trace, ph="s"), of(trace, ph="f")
    assert len({start["id"] for start in starts}) == len(starts) == 3
    assert [start["ts"] for start in starts] == [3.0, 3.0, 6.0]
    assert [end["ts"] for end in ends] == [10.0, 20.0, 30.0]


def test_work_whose_call_is_not_known_has_no_arrow() -> None:
    unknown = HostCall("cudaLaunchKernel", 11, T0 + 3000, T0 + 5000, 0)
    work = (DeviceWork("kernel", "from nowhere", 0, 3, T0 + 70_000, T0 + 71_000, correlation=0),)
    trace = chrome_trace(recording(calls=(unknown,), work=work))
    check(trace)
    assert of(trace, ph="s") == []


def test_work_that_seems_to_begin_before_its_call_has_an_arrow_that_goes_forward() -> None:
    """Clocks of host and device differ by some microseconds."""
    work = (DeviceWork("kernel", "early", 0, 3, T0 + 2500, T0 + 9000, correlation=7),)
    trace = chrome_trace(recording(work=work))
    check(trace)
    assert [one["ts"] for one in of(trace, ph="f")] == [3.0]


def test_an_end_before_the_start_is_no_negative_duration() -> None:
    work = (DeviceWork("kernel", "odd", 0, 3, T0 + 2500, T0 + 2000),)
    assert of(chrome_trace(recording(work=work)), name="odd")[0]["dur"] == 0


def test_marks_that_overlap_are_on_rows_of_their_own() -> None:
    def mark(name: str, start: int, end: int, thread: int = 1) -> Mark:
        return Mark("asynchronous runs", name, T0 + start, T0 + end, thread, {"n": name})

    marks = [
        mark("b", 2000, 8000), mark("a", 1000, 5000), mark("in b", 3000, 8000), mark("c", 5000, 9000),
        mark("other thread", 1000, 9000, thread=2),
    ]  # fmt: skip
    trace = chrome_trace(recording(), marks)
    check(trace)
    rows = {one["name"]: one["tid"] for one in of(trace, pid=ENGINES, ph="X")}
    assert rows["a"] == rows["c"]
    assert rows["b"] == rows["in b"]
    assert len({rows["a"], rows["b"], rows["other thread"]}) == 3
    assert {names(trace, "thread_name")[ENGINES, row] for row in rows.values()} == {"asynchronous runs"}


def test_an_empty_recording_is_a_trace() -> None:
    trace = chrome_trace(DeviceRecording(start_ns=T0, end_ns=T0))
    check(trace)
    assert of(trace, ph="X") == []
    assert set(names(trace, "process_name").values()) == {"host"}


def test_tasks_that_take_turns_on_a_thread_are_on_rows_of_their_own() -> None:
    """As coroutines do: Perfetto drops a slice that overlaps another of its track."""
    ranges = (
        Range(1, 0, "a", "range", 11, T0, T0 + 10_000),
        Range(2, 1, "b", "range", 11, T0 + 5_000, T0 + 15_000),
        Range(3, 2, "c", "range", 11, T0 + 6_000, T0 + 7_000),
        Range(4, 0, "d", "range", 12, T0 + 5_000, T0 + 15_000),
    )
    trace = chrome_trace(recording(ranges=ranges, calls=(), work=()))
    check(trace)
    threads = names(trace, "thread_name")
    tracks = {event["name"]: threads[event["pid"], event["tid"]] for event in of(trace, ph="X")}
    assert tracks == {"a": "thread 11", "b": "thread 11, row 2", "c": "thread 11", "d": "thread 12"}
    assert all(tid < 2**31 for _, tid in threads)
