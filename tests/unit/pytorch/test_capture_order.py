# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The order of streams around the warm-up of a capture, apart from CUDA."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from xpuruntime.pytorch.capture import streams  # noqa: E402
from xpuruntime.pytorch.capture.recording import CudaRecorder  # noqa: E402


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
    monkeypatch.setattr(streams, "take", lambda index: Stream("warm-up", log))
    monkeypatch.setattr(streams, "give_back", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("caller", log))
    recorder = CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext(), recorder.warming():
        log.append("work")
        if fails:
            raise ValueError("no")
    assert log == ["warm-up waits for caller", "work", "caller waits for warm-up"]
