# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Device work is joined to the node that was running when the host gave it away: made-up profiles and recordings."""

from __future__ import annotations

from typing import Any

import pytest

from xpuruntime.engines.onnxruntime.observing import profile as devices_module
from xpuruntime.engines.onnxruntime.observing.kernels import DeviceTimes, with_device_times
from xpuruntime.engines.onnxruntime.observing.profile import Devices, NodeEvent, NodeProfile, NodeSpan
from xpuruntime.errors import CudaError, InputError
from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
#: When the clock of the profile was zero.
T0 = 1_700_000_000_000_000_000
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x4_nn_align4>(Params)"
#: The counted runs begin here, microseconds; the cold one was before.
RUNS = (1000, 2000)


class Made:
    """A profile of two runs with the nodes mm (0 to 100 us of a run), loop (200 to 500) and, inside it, relu."""

    def __init__(self) -> None:
        self.calls: list[HostCall] = []
        self.work: list[DeviceWork] = []
        spans = []
        for run in RUNS:
            spans += [
                NodeSpan("mm", 0, "MatMul", run, run + 100, 1, CUDA),
                NodeSpan("loop", 1, "Loop", run + 200, run + 500, 1, CUDA),
                NodeSpan("relu", 0, "Relu", run + 300, run + 350, 1, CUDA),
                NodeSpan("host", 2, "Add", run + 600, run + 650, 1, CPU),
            ]
        self.profile = NodeProfile(
            events=(
                NodeEvent(name="mm", index=0, op="MatMul", provider=CUDA, time_us=100.0, runs=2),
                NodeEvent(name="loop", index=1, op="Loop", provider=CUDA, time_us=250.0, runs=2),
                NodeEvent(name="relu", index=0, op="Relu", provider=CUDA, time_us=50.0, runs=2),
                NodeEvent(name="host", index=2, op="Add", provider=CPU, time_us=50.0, runs=2),
            ),
            windows=tuple((run, run + 800) for run in RUNS),
            spans=tuple(spans),
        )

    def add(self, at: float, us: float, name: str = "k", kind: str = "kernel", call: str = "", **more: Any) -> None:
        """Add work that the host gave away at a moment of the profile's clock, and the device did much later."""
        number = len(self.calls) + 1
        start = T0 + round(at * 1000)
        self.calls.append(HostCall(call or "cudaLaunchKernel", 1, start, start + 2000, number))
        begin = start + 5_000_000
        given = {"correlation": number, **more}
        self.work.append(DeviceWork(kind, name, 0, 1, begin, begin + round(us * 1000), **given))  # type: ignore[arg-type]

    def joined(self) -> DeviceTimes:
        recording = DeviceRecording(source="cupti", work=tuple(self.work), calls=tuple(self.calls))
        return with_device_times(self.profile, recording, T0)


def event(found: DeviceTimes, name: str) -> NodeEvent:
    [node_event] = [event for event in found.profile.events if event.name == name]
    return node_event


def test_the_work_of_the_last_run_has_its_node_and_its_start() -> None:
    runs = Made()
    runs.add(RUNS[0] + 10, 5.0, GEMM)
    runs.add(RUNS[1] + 10, 6.0, GEMM)
    runs.add(RUNS[1] + 790, 1.0, "after", kind="fill")
    (inside, outside) = runs.joined().last_run
    assert (inside[0], inside[1].us, inside[2]) == (("mm", 0, "MatMul"), 6.0, RUNS[1] + 10 + 5000)
    assert (outside[0], outside[1].name) == (None, "after")


def test_work_belongs_to_the_node_that_gave_it_away() -> None:
    made = Made()
    for run, us in zip(RUNS, (10.0, 30.0), strict=True):
        made.add(run + 10, us, GEMM)
        made.add(run + 20, 1.0, "splitk")
        made.add(run + 21, 1.0, "splitk")
    found = made.joined()
    mm = event(found, "mm")
    assert mm.device_us == pytest.approx((12 + 32) / 2)
    assert (mm.time.kind, mm.time.value, mm.time.runs) == ("device", mm.device_us, 2)
    gemm, splitk = mm.device_kernels
    assert (gemm.name, gemm.kind, gemm.count, gemm.us, gemm.runs) == (GEMM, "kernel", 1.0, 20.0, 2)
    assert (gemm.tensor_cores, gemm.precision) == (True, "tf32")
    assert (splitk.count, splitk.us, splitk.tensor_cores, splitk.precision) == (2.0, 2.0, None, None)
    assert found.device_us == (12.0, 32.0) == found.in_nodes_us
    assert found.notes == ("of 22 us of device time in a run, 100% is work that nodes started",)
    assert found.boundaries == ()


def test_inside_a_node_that_holds_others_the_inner_one_has_it() -> None:
    made = Made()
    for run in RUNS:
        made.add(run + 320, 4.0, "inner")
        made.add(run + 400, 6.0, "outer")  # after the inner node
    found = made.joined()
    assert [kernel.name for kernel in event(found, "relu").device_kernels] == ["inner"]
    assert [kernel.name for kernel in event(found, "loop").device_kernels] == ["outer"]
    assert (event(found, "relu").device_us, event(found, "loop").device_us) == (4.0, 6.0)


def test_device_time_of_nodes_that_launched_nothing_and_of_cpu_nodes() -> None:
    runs = Made()
    runs.add(RUNS[0] + 10, 4.0)
    found = runs.joined()
    assert (event(found, "loop").device_us, event(found, "loop").device_kernels) == (0.0, ())
    assert event(found, "host").device_us is None
    assert event(found, "host").time.kind == "wall"
    assert event(found, "mm").device_us == 2.0  # the median of 4 and 0


def test_the_cold_run_and_what_is_between_runs_do_not_count() -> None:
    runs = Made()
    runs.add(50, 1000.0)  # the cold run
    runs.add(RUNS[0] + 900, 1000.0)  # between two
    runs.add(RUNS[1] + 801, 1000.0, kind="copy")  # after the last
    runs.add(RUNS[1] + 900, 1000.0, "the host waits", kind="wait")
    found = runs.joined()
    assert found.device_us == (0.0, 0.0)
    assert found.boundaries == ()
    assert found.notes == ()
    assert event(found, "mm").device_us == 0.0


def test_copies_outside_of_nodes_are_boundaries() -> None:
    made = Made()
    for run in RUNS:
        ends = {"source": "host (pageable)", "destination": "device"}
        made.add(run + 150, 3.0, "copy", "copy", bytes=4096, **ends)
        made.add(run + 160, 5.0, "copy", "copy", bytes=1024, **ends)
        made.add(run + 700, 2.0, "copy", "copy", bytes=256)
        made.add(run + 170, 1.0, "fill", "fill", bytes=64)
        made.add(run + 10, 92.0, "gemm")
    found = made.joined()
    told = [(b.kind, b.where, b.count, b.bytes, b.time and (b.time.value, b.time.kind)) for b in found.boundaries]
    assert told == [
        ("copy", "host (pageable) -> device, outside of nodes", 2, 5120, (8.0, "device")),
        ("copy", "? -> ?, outside of nodes", 1, 256, (2.0, "device")),
        ("copy", "fills outside of nodes", 1, 64, (1.0, "device")),
    ]
    assert found.device_us == (103.0, 103.0)
    assert found.in_nodes_us == (92.0, 92.0)
    assert found.notes == ("of 103 us of device time in a run, 89% is work that nodes started",)


def test_copies_inside_of_nodes_are_theirs() -> None:
    made = Made()
    for run in RUNS:
        made.add(run + 10, 3.0, "copy", "copy", bytes=4096, source="device", destination="device")
    found = made.joined()
    [copy] = event(found, "mm").device_kernels
    assert (copy.kind, copy.name, copy.bytes, copy.count) == ("copy", "copy device -> device", 4096, 1.0)
    assert found.boundaries == ()


def test_what_the_host_waited_for_is_a_boundary_and_no_device_time() -> None:
    made = Made()
    for run, us in zip(RUNS, (40.0, 60.0), strict=True):
        made.add(run + 700, us, "the host waits for a stream", "wait")
    made.work.append(  # with no call of its own, where it began is where it was
        DeviceWork("wait", "the host waits for an event", 0, 1, T0 + 1_010_000, T0 + 1_014_000)
    )
    found = made.joined()
    told = {b.where: (b.kind, b.count, b.bytes, b.time and (b.time.value, b.time.kind)) for b in found.boundaries}
    assert told == {
        "the host waits for a stream": ("sync", 1, None, (50.0, "wall")),
        "the host waits for an event": ("sync", 1, None, (2.0, "wall")),
    }
    assert found.device_us == (0.0, 0.0)


@pytest.mark.parametrize("runtime_first", [True, False])
def test_of_two_calls_with_one_number_the_outer_one_tells_when(runtime_first: bool) -> None:
    """The call into CUDA's runtime begins in the node, the driver's inside it when the node was over."""
    runs = Made()
    runs.add(RUNS[0] + 99, 7.0)
    [runtime] = runs.calls
    driver = HostCall("cuLaunchKernel", 1, runtime.start_ns + 1500, runtime.end_ns, runtime.correlation)
    runs.calls = [runtime, driver] if runtime_first else [driver, runtime]
    assert runs.joined().device_us == (7.0, 0.0)
    assert event(runs.joined(), "mm").device_us == 3.5


# Devices, which records while the instrumented session runs.


class Session:
    def __init__(self, began: int | None) -> None:
        if began is not None:
            self.get_profiling_start_time_ns = lambda: began


class Recorder:
    """What a recorder of devices gives, or raises."""

    def __init__(self, recording: DeviceRecording | Exception, begins: Exception | None = None) -> None:
        self.recording, self.begins = recording, begins

    def __call__(self) -> Recorder:
        return self

    def start(self) -> None:
        if self.begins is not None:
            raise self.begins

    def stop(self) -> DeviceRecording:
        if isinstance(self.recording, Exception):
            raise self.recording
        return self.recording


def watched(monkeypatch: pytest.MonkeyPatch, recorder: Recorder, began: int | None = T0) -> DeviceTimes:
    monkeypatch.setattr(devices_module, "DeviceRecorder", recorder)
    devices = Devices("cuda:0")
    with devices:
        pass
    devices.begin_of(Session(began))
    return devices.added_to(Made().profile)


@pytest.mark.parametrize("source", ["cupti", "kineto"])
def test_what_was_recorded_is_joined(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    runs = Made()
    runs.add(RUNS[0] + 10, 4.0, GEMM)
    recording = DeviceRecording(source=source, work=tuple(runs.work), calls=tuple(runs.calls), notes=("one is lost",))  # type: ignore[arg-type]
    found = watched(monkeypatch, Recorder(recording))
    assert event(found, "mm").device_us == 2.0
    assert found.notes[0] == "one is lost"


@pytest.mark.parametrize("source", ["events", "none"])
def test_from_other_sources_nothing_is_joined(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    found = watched(monkeypatch, Recorder(DeviceRecording(source=source, notes=("why",))))  # type: ignore[arg-type]
    assert event(found, "mm").device_us is None
    assert (found.notes, found.device_us) == (("why",), ())


def test_an_onnxruntime_that_does_not_say_when_it_began_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(monkeypatch, Recorder(DeviceRecording(source="cupti")), None)
    assert any("does not say when its profile began" in note for note in found.notes)
    assert event(found, "mm").device_us is None


@pytest.mark.parametrize(
    "recorder",
    [
        Recorder(DeviceRecording(source="cupti"), InputError("a recording goes on already")),
        Recorder(CudaError("the device failed")),
    ],
    ids=["start", "stop"],
)
def test_a_recorder_that_fails_is_noted_and_the_pass_goes_on(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    found = watched(monkeypatch, recorder)
    [note] = found.notes
    assert note.startswith("what the device did is not seen: ")
    assert event(found, "mm").time.kind == "wall"


def test_on_the_cpu_nobody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "DeviceRecorder", Recorder(CudaError("never"), CudaError("never")))
    devices = Devices("cpu")
    with devices:
        pass
    assert devices.marks(Made().profile) == []  # nobody has asked when it began
    devices.begin_of(Session(T0))
    assert devices.added_to(Made().profile).notes == ()
    marks = devices.marks(Made().profile)
    assert [mark.name for mark in marks] == ["mm", "loop", "relu", "host"] * 2
    assert (marks[0].start_ns, marks[0].end_ns) == (T0 + 1_000_000, T0 + 1_100_000)
    assert marks[0].details == {"op": "MatMul", "provider": CUDA}
