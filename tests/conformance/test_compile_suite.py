# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One suite, every engine that compiles where its device is not."""

import pytest

from xpuruntime.testing import CompileSuite

pytest.importorskip("tensorrt_rtx")


class TestTensorRtRtx(CompileSuite):
    engine = "tensorrt-rtx"
    device = "cuda:0"
    execution = {"provider_options": {"tensorrt-rtx": {"compute_capability": "8.6"}}}  # noqa: RUF012 - overrides a ClassVar
    unsupported_op = "Unique"
