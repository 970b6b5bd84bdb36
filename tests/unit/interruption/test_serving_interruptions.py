# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions of servers and models in the main thread leave no thread, no lock and no port taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import press_before

from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

# An interruption inside of a destructor is lost: Python writes it to stderr, and pytest warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
WAIT = 60.0
REQUEST = InferRequest("mlp", [InferTensor("x", "FP32", (1, 64), np.ones((1, 64), np.float32))])


def _settings(tmp_path: Path, **listeners: Any) -> ServeSettings:
    path = models.save(models.mlp(), tmp_path, "mlp.onnx")
    model = {"source": str(path), "batching": {"max_batch_size": 4}}
    return ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"mlp": model}, **listeners})


def _ask(service: Any) -> None:
    assert service.infer(REQUEST).result(WAIT).outputs[0].data.shape == (1, 64)


@pytest.mark.parametrize("step", ["_queue", "_drop"])
def test_ctrl_c_while_a_request_is_queued_or_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with Models(_settings(tmp_path)) as service:
        batcher = service.slots["mlp"].loaded[0].batcher
        with monkeypatch.context() as patch:
            patch.setattr(type(batcher), step, press_before(getattr(type(batcher), step)))
            with pytest.raises(KeyboardInterrupt):
                service.infer(REQUEST).cancel()
        _ask(service)
        assert service.slots["mlp"].loaded[0].drain(WAIT)
        assert not batcher.unanswered


def test_ctrl_c_while_a_model_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Models(_settings(tmp_path)) as service:
        slot = type(service.slots["mlp"])
        with monkeypatch.context() as patch:
            patch.setattr(slot, "_exchange", press_before(slot._exchange))
            with pytest.raises(KeyboardInterrupt):
                service.load("mlp", {})
        _ask(service)
        service.load("mlp", {})
        _ask(service)
