# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observation of ONNX Runtime: instrumented runs, and the attribution of what ran to the nodes of the source graph."""

from __future__ import annotations

from xpuruntime.engines.onnxruntime.observing.instrumented_run import assignment, instrument, observe
from xpuruntime.engines.onnxruntime.observing.unit_attribution import Assigned

__all__ = ["Assigned", "assignment", "instrument", "observe"]
