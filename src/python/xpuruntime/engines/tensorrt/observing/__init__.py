# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What an engine of TensorRT or TensorRT-RTX is made of and how long its layers take, as evidence."""

from __future__ import annotations

from xpuruntime.engines.tensorrt.observing.inspector import Layer, TensorSeen, read_engine
from xpuruntime.engines.tensorrt.observing.join import join
from xpuruntime.engines.tensorrt.observing.watch import observe

__all__ = ["Layer", "TensorSeen", "join", "observe", "read_engine"]
