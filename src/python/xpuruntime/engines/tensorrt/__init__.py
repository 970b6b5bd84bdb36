# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The engines TensorRT (10 and 11) and TensorRT-RTX: one adapter over what differs between them."""

from __future__ import annotations

from xpuruntime.engines.tensorrt.engine import TensorRtEngine, TensorRtRtxEngine

__all__ = ["TensorRtEngine", "TensorRtRtxEngine"]
