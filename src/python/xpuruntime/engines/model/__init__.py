# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reading an ONNX model without any engine: its facts, its faults, its files."""

from __future__ import annotations

from xpuruntime.engines.model.external import ExternalFile
from xpuruntime.engines.model.facts import NodeInfo, Quantization, TensorInfo
from xpuruntime.engines.model.info import ModelInfo, inspect_bytes, inspect_edited, inspect_model
from xpuruntime.engines.model.shapes import ShapeRange, open_dimensions, shape_ranges, with_shapes

__all__ = [
    "ExternalFile",
    "ModelInfo",
    "NodeInfo",
    "Quantization",
    "ShapeRange",
    "TensorInfo",
    "inspect_bytes",
    "inspect_edited",
    "inspect_model",
    "open_dimensions",
    "shape_ranges",
    "with_shapes",
]
