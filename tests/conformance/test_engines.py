# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One suite, every engine that can run without a device."""

import importlib.util

import pytest

from xpuruntime.testing import EngineSuite


class TestOnnxRuntimeCpu(EngineSuite):
    engine = "onnxruntime"
    device = "cpu"


class TestNull(EngineSuite):
    engine = "null"
    device = "cpu"
    unsupported = {"computes": "it computes nothing: all outputs are zero"}  # noqa: RUF012 - overrides a ClassVar


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs openvino")
class TestOpenVinoCpu(EngineSuite):
    engine = "openvino"
    device = "cpu"
    dtypes = tuple(dtype for dtype in EngineSuite.dtypes if dtype != "float64")  # which it computes in fp32, and warns
