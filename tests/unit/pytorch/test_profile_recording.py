# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What PyTorch's profiler tells, as a recording of ours: made-up events as it gives them on a GPU, and a trace's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.errors import InputError
from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall, Range

torch = pytest.importorskip("torch")

from torch.autograd import DeviceType  # noqa: E402

from xpuruntime.pytorch.profiling import kineto_recording  # noqa: E402
from xpuruntime.pytorch.profiling.kineto_recording import KinetoRecording, assign_ranges, nest, read, sizes, with_bytes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch


class Event:
    """An event with the methods that kineto's have."""

    def __init__(
        self, name: str, start: int, duration: int, *, device: bool = False, thread: int = 5, correlation: int = 0,
        **flags: Any,
    ) -> None:  # fmt: skip
        self._values = {
            "name": name,
            "start_ns": start,
            "duration_ns": duration,
            "device_type": DeviceType.CUDA if device else DeviceType.CPU,
            "device_index": 1 if device else -1,
            "device_resource_id": 7 if device else thread,
            "correlation_id": correlation,
            "is_hidden_event": False,
            "is_user_annotation": False,
            "is_async": False,
            "start_thread_id": 1,
            "end_thread_id": 1,
            **flags,
        }

    def __getattr__(self, name: str) -> Any:
        return lambda: self._values[name]


def kernel(name: str, start: int, duration: int = 10, **more: Any) -> Event:
    return Event(name, start, duration, device=True, **more)


def test_events_are_sorted_by_what_they_are() -> None:
    work, calls, operators, dropped = read(
        [
            Event("aten::mm", 100, 50),
            Event("cudaLaunchKernel", 120, 5, correlation=9),
            Event("cuLaunchKernelEx", 121, 3, correlation=9),
            kernel("gemm", 400, correlation=9),
            kernel("early", 300, correlation=8),
            Event("cuda graphs of mine", 130, 5),  # a range of the program's
            Event("customOp", 140, 5),
        ],
        100,
    )
    assert [(one.kind, one.name, one.device, one.stream, one.correlation) for one in work] == [
        ("kernel", "early", 1, 7, 8),
        ("kernel", "gemm", 1, 7, 9),
    ]
    assert work[1].us == 0.01
    assert calls == [
        HostCall("cudaLaunchKernel", 5, 120, 125, 9),
        HostCall("cuLaunchKernelEx", 5, 121, 124, 9),
    ]
    assert [(one.name, one.category, one.thread) for one in operators] == [
        ("aten::mm", "torch", 5),
        ("cuda graphs of mine", "torch", 5),
        ("customOp", "torch", 5),
    ]
    assert dropped == 0


@pytest.mark.parametrize(
    ("name", "kind", "told", "source", "destination"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "copy", "copy", "host (pageable)", "device"),
        ("Memcpy DtoH (Device -> Pinned)", "copy", "copy", "device", "host (pinned)"),
        ("Memcpy DtoD (Device -> Device)", "copy", "copy", "device", "device"),
        ("Memcpy PtoP (Array -> Managed)", "copy", "copy", "Array", "managed"),
        ("Memcpy HtoD", "copy", "copy", "", ""),
        ("Memset (Device)", "fill", "fill", "", "device"),
        ("Memset (Unknown)", "fill", "fill", "", "Unknown"),
        ("Memset", "fill", "fill", "", ""),
        ("Stream Sync", "wait", "Stream Sync", "", ""),
        ("Context Sync", "wait", "Context Sync", "", ""),
        ("Stream Wait Event", "wait", "Stream Wait Event", "", ""),
        ("void memcpy_kernel<float>(float*)", "kernel", "void memcpy_kernel<float>(float*)", "", ""),
    ],
)
def test_what_a_device_did(name: str, kind: str, told: str, source: str, destination: str) -> None:
    [one], *_ = read([kernel(name, 1)], 10)
    assert (one.kind, one.name, one.source, one.destination) == (kind, told, source, destination)


def test_what_is_no_piece_of_work_or_operator_is_left_out() -> None:
    work, calls, operators, dropped = read(
        [
            Event("hidden", 1, 1, is_hidden_event=True),
            Event("[memory]", 1, 0),
            Event("async", 1, 1, is_async=True),
            Event("of two threads", 1, 1, end_thread_id=2),
            kernel("my range", 1, is_user_annotation=True),
        ],
        10,
    )
    assert (work, calls, operators, dropped) == ([], [], [], 0)


def test_beyond_the_limit_each_kind_is_counted() -> None:
    events = [
        *(kernel("k", at) for at in range(5)),
        *(Event("cudaLaunchKernel", at, 1) for at in range(4)),
        *(Event("aten::mm", at, 1) for at in range(3)),
    ]
    work, calls, operators, dropped = read(events, 2)
    assert (len(work), len(calls), len(operators), dropped) == (2, 2, 2, 3 + 2 + 1)


def operator(name: str, start: int, end: int, thread: int = 5) -> Range:
    return Range(0, 0, name, "torch", thread, start, end)


def test_operators_nest_per_thread() -> None:
    found = nest(
        [
            operator("aten::mm", 20, 40),
            operator("aten::linear", 10, 60),
            operator("aten::relu", 70, 80),
            operator("elsewhere", 30, 35, thread=6),
            operator("aten::add", 40, 60),
            operator("the same time", 10, 60),
        ],
        100,
    )
    parents = {one.name: next((other.name for other in found if other.id == one.parent), None) for one in found}
    assert parents == {
        "aten::linear": None,
        "the same time": "aten::linear",
        "aten::mm": "the same time",
        "aten::add": "the same time",
        "aten::relu": None,
        "elsewhere": None,
    }
    assert sorted(one.id for one in found) == list(range(100, 106))


def test_work_is_placed_in_the_innermost_range_around_its_call() -> None:
    ranges = [
        Range(1, 0, "step", "range", 5, 0, 1000),
        Range(2, 1, "mm", "kernel", 5, 100, 200),
        Range(3, 1, "relu", "kernel", 5, 300, 400),
        Range(4, 0, "other thread", "range", 6, 0, 1000),
    ]
    calls = [
        HostCall("cudaLaunchKernel", thread, at, at + 1, number)
        for number, (thread, at) in enumerate([(5, 150), (5, 250), (5, 350), (6, 150), (7, 150), (5, 2000)], 1)
    ]
    calls.append(HostCall("cudaLaunchKernel", 5, 150, 151, 0))
    work = [DeviceWork("kernel", "k", 0, 0, 9, 10, correlation=number) for number in (1, 2, 3, 4, 5, 6, 7, 0)]
    assert [range_.range for range_ in assign_ranges(work, calls, ranges)] == [2, 1, 3, 4, 0, 0, 0, 0]


def test_bytes_come_from_the_trace_in_the_order_of_a_call() -> None:
    known = sizes(
        [
            {"ph": "X", "cat": "gpu_memcpy", "ts": 30.0, "args": {"correlation": 4, "bytes": 20}},
            {"ph": "X", "cat": "gpu_memcpy", "ts": 10.0, "args": {"correlation": 4, "bytes": 10}},
            {"ph": "X", "cat": "gpu_memset", "ts": 10.0, "args": {"correlation": 5, "bytes": 64}},
            {"ph": "X", "cat": "kernel", "ts": 10.0, "args": {"correlation": 6, "bytes": 99}},
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert known == {4: [(10.0, 10), (30.0, 20)], 5: [(10.0, 64)]}

    def piece(kind: Any, correlation: int) -> DeviceWork:
        return DeviceWork(kind, str(kind), 0, 0, 1, 2, correlation=correlation)

    work = [
        piece("copy", 4),
        piece("kernel", 6),
        piece("copy", 4),
        piece("fill", 5),
        piece("copy", 4),
        piece("copy", 3),
    ]
    assert [one.bytes for one in with_bytes(work, known)] == [10, 0, 20, 64, 0, 0]


class Profiler:
    """PyTorch's profiler, with events of a device."""

    def __init__(self) -> None:
        self.torch = self

    def events(self) -> Iterator[Event]:
        yield Event("aten::mm", 100, 50)
        yield Event("cudaLaunchKernel", 120, 5, correlation=9)
        yield Event("cudaMemcpyAsync", 130, 5, correlation=10)
        yield kernel("gemm", 400, correlation=9)
        yield kernel("Memcpy DtoH (Device -> Pinned)", 500, correlation=10)

    def export_chrome_trace(self, path: str) -> None:
        events = [{"cat": "gpu_memcpy", "ts": 0.5, "args": {"correlation": 10, "bytes": 4096}}]
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - as PyTorch does
            json.dump({"schemaVersion": 1, "traceEvents": events}, file)


@pytest.mark.parametrize("limit", [100, 1])
def test_a_recording_gets_work_calls_and_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int) -> None:
    monkeypatch.setattr(kineto_recording, "Profiler", Profiler)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ours = DeviceRecording(
        start_ns=0,
        end_ns=1000,
        ranges=(Range(41, 0, "step", "range", 5, 90, 200), Range(42, 41, "matmul cublas", "kernel", 5, 110, 160)),
        notes=("a note",),
        dropped=2,
    )
    found = KinetoRecording(limit).added_to(ours)
    assert found.source == "kineto"
    assert [(range_.name, range_.id) for range_ in found.ranges] == [
        ("step", 41),
        ("aten::mm", 43),
        ("matmul cublas", 42),
    ]
    assert (found.start_ns, found.end_ns) == (0, 1000)
    if limit == 100:
        assert [(one.kind, one.range, one.bytes) for one in found.work] == [("kernel", 42, 0), ("copy", 42, 4096)]
        assert [call.name for call in found.calls] == ["cudaLaunchKernel", "cudaMemcpyAsync"]
        assert (found.notes, found.dropped) == (("a note",), 2)
    else:
        assert (len(found.work), len(found.calls)) == (1, 1)
        assert found.dropped == 4
        assert found.notes[1].startswith("2 records are lost")


def test_a_profiler_of_pytorch_that_runs_is_not_disturbed() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as theirs,
        pytest.raises(InputError, match="a recording of devices needs PyTorch's profiler, and one runs already"),
    ):
        KinetoRecording(10)
    assert theirs.events() is not None


@pytest.mark.filterwarnings("ignore")
def test_operators_of_a_real_profile_nest() -> None:
    kineto = KinetoRecording(10_000)
    kineto.start()
    torch.nn.Linear(8, 4)(torch.ones(2, 8)).relu()
    kineto.stop()
    found = kineto.added_to(DeviceRecording())
    by_id = {range_.id: range_ for range_ in found.ranges}
    named = {range_.name: range_ for range_ in found.ranges}
    assert {"aten::linear", "aten::addmm", "aten::relu"} <= set(named)
    assert by_id[named["aten::addmm"].parent].name == "aten::linear"
    for range_ in found.ranges:
        if range_.parent:
            around = by_id[range_.parent]
            assert around.start_ns <= range_.start_ns <= range_.end_ns <= around.end_ns
    assert found.work == ()
