# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fixtures of the tests of serving: models on disk, and services that are closed at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """Return a model with `x` float32 [N, 64] and `y` of the same shape."""
    return models.save(models.mlp(), tmp_path, "mlp.onnx")


@pytest.fixture
def serve() -> Iterator[Callable[..., Models]]:
    """Return a function that serves models of ``serve.yaml``, by name."""
    made: list[Models] = []

    def start(given: dict[str, Any], *, memory: Any = None, **more: Any) -> Models:
        document: dict[str, Any] = {"schema": "xpuruntime.serve/1", "models": given}
        if memory is not None:
            document["memory"] = memory
        service = Models(ServeSettings.coerce(document), **more)
        made.append(service)
        service.start()
        return service

    yield start
    for service in made:
        service.close(drain=1.0)
