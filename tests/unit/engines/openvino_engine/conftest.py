# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models on disk for the tests of OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from xpuruntime.runtime.interruptible_waits import kept_signal_stack
from xpuruntime.testing import models


@pytest.fixture(autouse=True)
def _signal_stack() -> Iterator[None]:
    """Some tests ask OpenVINO itself, which leaves a thread with a signal stack that is gone."""
    with kept_signal_stack():
        yield


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return models.save(models.mlp(), tmp_path)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Return an MLP whose arrays are large enough to be shared."""
    return models.save(models.mlp(width=512), tmp_path)
