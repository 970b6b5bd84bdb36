# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions of servers and models in the main thread leave no thread, no lock and no port taken."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from interrupting import WAYS, sweep

import xpuruntime as xrt
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable
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


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(("xpuruntime-", "xrt-"))]


def _ended() -> None:
    """Wait for the threads that end what was interrupted."""
    until = time.monotonic() + WAIT
    while _threads():
        assert time.monotonic() < until, _threads()
        time.sleep(0.001)


def _swept(way: str, work: Callable[[], Any], check: Callable[[], Any], times: int) -> None:
    assert sweep(way, work, check, times) > times / 10


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_starts_answers_and_stops(tmp_path: Path, way: str) -> None:
    pytest.importorskip("uvicorn")
    settings = _settings(tmp_path, http={"listen": "127.0.0.1:0"})

    def work() -> None:
        with xrt.serving.Server.from_settings(settings) as server:
            _ask(server.models)

    _swept(way, work, _ended, 12)


@pytest.mark.parametrize("way", WAYS)
def test_models_that_are_loaded_again_and_unloaded(tmp_path: Path, way: str) -> None:
    settings = _settings(tmp_path)
    with Models(settings) as service:

        def work() -> None:
            service.load("mlp", {})
            _ask(service)
            service.unload("mlp", {})

        def check() -> None:
            service.load("mlp", {})
            _ask(service)

        _swept(way, work, check, 20)
    _ended()


@pytest.mark.parametrize("way", WAYS)
def test_requests_and_cancelled_ones(tmp_path: Path, way: str) -> None:
    settings = _settings(tmp_path)
    with Models(settings) as service:

        def work() -> None:
            futures = [service.infer(REQUEST) for _ in range(6)]
            futures[0].cancel()
            for future in futures[1:]:
                future.result()

        def check() -> None:
            _ask(service)
            until = time.monotonic() + WAIT
            while service.slots["mlp"].loaded[0].batcher.unanswered:
                assert time.monotonic() < until
                time.sleep(0)

        _swept(way, work, check, 60)
        assert service.slots["mlp"].loaded[0].drain(WAIT)
    _ended()
