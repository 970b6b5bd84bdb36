# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which source is asked for the work of devices: the core's own, or PyTorch's profiler while that has CUDA."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime import _core
from xpuruntime.engines.observation import DeviceRecorder
from xpuruntime.engines.torch import TorchEngine
from xpuruntime.errors import CudaError, InputError
from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, profiled

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not _core.profiler_active()


class Kineto:
    """PyTorch's profiler, as the recorder sees it."""

    started: int = 0
    stopped: int = 0

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def start(self) -> None:
        type(self).started += 1

    def stop(self) -> None:
        type(self).stopped += 1

    def abandon(self) -> None:
        type(self).stopped += 1

    def added_to(self, kineto_recording: DeviceRecording) -> DeviceRecording:
        return DeviceRecording(
            source="kineto", ranges=kineto_recording.ranges, work=(DeviceWork("kernel", "k", 0, 0, 1, 2),)
        )


@pytest.fixture
def kineto(monkeypatch: pytest.MonkeyPatch) -> type[Kineto]:
    """Have a PyTorch with CUDA, and a profiler of it that needs no device."""
    from xpuruntime.pytorch.profiling import kineto_recording

    class Fresh(Kineto):
        pass

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kineto_recording, "KinetoRecording", Fresh)
    return Fresh


def recorded(recorder: DeviceRecorder) -> DeviceRecording:
    recorder.start()
    with profiled("one"):
        pass
    return recorder.stop()


@pytest.mark.parametrize(("cuda", "available"), [("13.0", False), (None, True)])
def test_pytorch_is_asked_only_where_it_can_profile_cuda(
    kineto: type[Kineto], monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert recorded(DeviceRecorder()).source != "kineto"
    assert kineto.started == 0


def test_a_pytorch_that_is_not_imported_or_half_imported_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert TorchEngine().device_recorder(1) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert TorchEngine().device_recorder(1) is None


def test_beside_pytorch_ranges_are_ours_and_work_is_pytorchs(kineto: type[Kineto]) -> None:
    recorder = DeviceRecorder(limit=7)
    for times in (1, 2):
        kineto_recording = recorded(recorder)
        assert kineto_recording.source == "kineto"
        assert [range_.name for range_ in kineto_recording.ranges] == ["one"]
        assert [one.name for one in kineto_recording.work] == ["k"]
        assert (kineto.started, kineto.stopped) == (times, times)


def test_where_pytorchs_profiler_runs_already_a_note_says_so(
    kineto: type[Kineto], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Any, limit: int) -> None:
        raise InputError("one runs already")

    recorder = DeviceRecorder()
    with monkeypatch.context() as patched:
        patched.setattr(kineto, "__init__", refused)
        kineto_recording = recorded(recorder)
    assert kineto_recording.source != "kineto"
    assert kineto_recording.notes[0] == "PyTorch's profiler cannot be asked for the work of devices: one runs already"
    assert recorded(recorder).notes == ()  # what was once is not said again


def test_a_profiler_that_does_not_start_leaves_no_recording(
    kineto: type[Kineto], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(self: Any) -> None:
        raise RuntimeError("CUPTI is taken")

    monkeypatch.setattr(kineto, "start", failed)
    with pytest.raises(RuntimeError, match="CUPTI is taken"):
        DeviceRecorder().start()
    assert not _core.profiler_active()


def test_a_device_that_failed_ends_the_recording(kineto: type[Kineto], monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(self: Any) -> None:
        raise CudaError("an illegal address")

    monkeypatch.setattr(kineto, "stop", failed)
    recorder = DeviceRecorder()
    recorder.start()
    with pytest.raises(CudaError, match="illegal"):
        recorder.stop()
    assert not _core.profiler_active()
