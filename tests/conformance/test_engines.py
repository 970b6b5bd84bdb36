# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One suite, every engine that can run without a device."""

from xpuruntime.testing import EngineSuite


class TestOnnxRuntimeCpu(EngineSuite):
    engine = "onnxruntime"
    device = "cpu"


class TestNull(EngineSuite):
    engine = "null"
    device = "cpu"
    unsupported = {"computes": "it computes nothing: all outputs are zero"}  # noqa: RUF012 - overrides a ClassVar


class TestOpenVinoCpu(EngineSuite):
    engine = "openvino"
    device = "cpu"
