# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence of an engine of TensorRT or TensorRT-RTX: its layers and their times."""

from __future__ import annotations

from xpuruntime.engines.tensorrt.observing.instrumented_run import observe
from xpuruntime.engines.tensorrt.observing.unit_attribution import Layer, TensorSeen, attribute_units, read_engine

__all__ = ["Layer", "TensorSeen", "attribute_units", "observe", "read_engine"]
