# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The benchmark of a training step runs: by hand, eagerly and by `capture_graph`, whose memory must not mix."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.torch

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def test_the_graph_captured_by_hand_keeps_what_it_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench: Any = importlib.import_module("bench_training_step")
    models: Any = importlib.import_module("training_models")
    training = bench.Training(models.Decoder, models.Size(layers=1, width=64, heads=2, words=128, positions=32))
    weight, optimizer = weakref.ref(training.model.words.weight), weakref.ref(training.optimizer)
    batch = tuple(torch.randint(128, (2, 32), device="cuda") for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
        step = bench.by_hand(training, batch)
    del training
    gc.collect()  # as capture_graph does before it captures
    torch.cuda.empty_cache()
    assert weight() is not None
    assert optimizer() is not None
    before = weight().detach().clone()
    losses = [step(*batch).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert not torch.equal(weight(), before)


def test_all_phases_run_beside_each_other(tmp_path: Path) -> None:
    """In a process of its own: what reads memory that is gone spoils the CUDA context."""
    out = tmp_path / "training_step.json"
    command = [sys.executable, str(FOLDER / "bench_training_step.py"), "--quick", "--skip-compile"]
    command += ["--shapes", "gpt2-1x1024,bert-1x128", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(out.read_text())["cases"]
    assert {(case["shape"], case["phase"]) for case in cases} == {
        (shape, phase) for shape in ("gpt2-1x1024", "bert-1x128") for phase in ("plain", "eager", "norms", "tuned")
    }
    assert all("ms" in case and "error" not in case for case in cases)
