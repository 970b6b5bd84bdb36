# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The chip of the process that runs the tests, whichever of them runs first in a worker, and a model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from qnn_models import SOC

from xpuruntime.engines.qnn.opening import claim
from xpuruntime.engines.qnn.options import resolve_target
from xpuruntime.testing import models

_target = resolve_target({"soc": SOC})
assert _target is not None
claim(_target)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return models.save(models.mlp(batch=4), tmp_path)
