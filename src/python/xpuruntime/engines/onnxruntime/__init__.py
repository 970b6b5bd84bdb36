# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The ONNX Runtime engine: CPU and CUDA execution providers."""

from __future__ import annotations

from xpuruntime.engines.onnxruntime.engine import OnnxRuntimeEngine

__all__ = ["OnnxRuntimeEngine"]
