# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Watching ONNX Runtime run a model, and joining what ran to the nodes of the source graph."""

from __future__ import annotations

from xpuruntime.engines.onnxruntime.observing.join import Assigned
from xpuruntime.engines.onnxruntime.observing.watch import assignment, instrument, observe

__all__ = ["Assigned", "assignment", "instrument", "observe"]
