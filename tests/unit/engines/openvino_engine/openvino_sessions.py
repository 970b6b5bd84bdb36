# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models and sessions for the tests of OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import xpuruntime as xrt

VALUE = helper.make_tensor_value_info


def open_(path: Path, **options: Any) -> xrt.InferenceSession:
    return xrt.InferenceSession(path, device="cpu", engine="openvino", **options)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: tuple[Any, ...] = ()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def x_of(seed: int, rows: int, width: int = 512) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
