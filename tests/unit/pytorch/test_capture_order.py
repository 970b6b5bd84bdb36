# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The order of streams around the warm-up of a capture, apart from CUDA."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from xpuruntime.pytorch.capture import graph_recorder  # noqa: E402
from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder  # noqa: E402


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_the_caller_waits_for_the_warmup_also_where_it_fails(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graph_recorder, "take_stream", lambda index: Stream("warm-up", log))
    monkeypatch.setattr(graph_recorder, "release_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("caller", log))
    monkeypatch.setattr(graph_recorder, "make_workspaces", lambda stream: log.append(f"workspaces of {stream.name}"))
    recorder = CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext(), recorder.warming():
        log.append("work")
        if fails:
            raise ValueError("no")
    # Work before them would make workspaces in memory that does not stay.
    assert log == ["warm-up waits for caller", "workspaces of warm-up", "work", "caller waits for warm-up"]


class PyTorchStream(torch.Stream):
    """One of PyTorch's own, which says of itself neither that it is equal to None nor that it is other."""

    def wait_stream(self, other: torch.Stream) -> None:
        LOG.append((self.stream_id, other.stream_id))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


LOG: list[tuple[int, int]] = []


def test_a_replay_waits_for_the_last_one_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder, "take_stream", lambda index: None)
    monkeypatch.setattr(graph_recorder, "release_stream", lambda stream: None)
    recorder = CudaRecorder(torch.device("cuda", 0))
    LOG.clear()
    for number in (7, 7, 8, 8, 7):
        stream = PyTorchStream(stream_id=number, device_index=0, device_type=1)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        recorder.order()
    assert LOG == [(8, 7), (7, 8)]


def test_a_stream_is_given_back_wherever_the_collector_frees_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder, "_free", {})
    stream = PyTorchStream(stream_id=1, device_index=0, device_type=1)
    with graph_recorder._lock:  # as workspaces are made
        graph_recorder.release_stream(stream)
    assert graph_recorder.take_stream(0) is stream
