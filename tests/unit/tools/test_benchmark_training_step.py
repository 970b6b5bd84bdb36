# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the benchmark of a training step keeps alive, since a CUDA graph keeps nothing, and the rounds of its steps."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.mark.parametrize("name", ["by hand", "eager", "eager, flash pinned"])
def test_each_variant_keeps_its_model_and_its_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    bench: Any = importlib.import_module("bench_training_step")
    models: Any = importlib.import_module("training_models")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)

    class OnCpu(bench.Training):
        def __init__(self) -> None:
            self.model = models.Decoder(models.Size(layers=1, width=16, heads=2, words=32, positions=8))
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.loss = self.forward

        def forward(self, tokens: Any, wanted: Any) -> Any:
            return bench.loss_of(self.model(tokens), wanted)

    training = OnCpu()
    kept = [weakref.ref(training.optimizer), *(weakref.ref(p) for p in training.model.parameters())]
    batch = tuple(torch.randint(32, (1, 8)) for _ in range(2))
    step = bench.PHASES["eager"][1][name](training, batch)
    del training
    gc.collect()
    assert all(one() is not None for one in kept)
    step(*batch)


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1.5


def test_each_variant_settles_and_is_timed_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    bench: Any = importlib.import_module("bench_training_step")
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran = dict.fromkeys(("by hand", "eager", "eager, tuned"), 0)

    def step_of(name: str) -> Any:
        def step(tokens: int, wanted: int) -> None:
            ran[name] += 1

        return step

    steps = {name: step_of(name) for name in ran}
    samples = bench.rounds_of(steps, [(0, 0), (1, 1)], rounds=3, calls=4, settling=2)
    assert samples == dict.fromkeys(ran, [1.5] * 3)
    assert ran == dict.fromkeys(ran, 18)
