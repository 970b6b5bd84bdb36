# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The conformance suite on the CUDA provider."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.testing import EngineSuite


@pytest.mark.cuda_onnxruntime
class TestOnnxRuntimeCuda(EngineSuite):
    engine = "onnxruntime"
    device = "cuda:0"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "float16", "int32", "int64", "bool")

    def _write(self, buffer: Any, values: np.ndarray[Any, Any]) -> None:
        buffer.copy_(xrt.Tensor.from_numpy(np.ascontiguousarray(values)), stream=0)

    def _read(self, buffer: Any) -> np.ndarray[Any, Any]:
        return buffer.to("cpu", stream=0).numpy().copy()
