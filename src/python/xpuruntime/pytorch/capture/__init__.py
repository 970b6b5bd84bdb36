# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training steps as CUDA graphs: `capture_graph`."""

from xpuruntime.pytorch.capture.api import capture_graph
from xpuruntime.pytorch.capture.graph_key import CaptureReport, GraphInfo
from xpuruntime.pytorch.capture.scoped_capture import GraphBlock
from xpuruntime.pytorch.capture.step import CapturedStep

__all__ = ["CaptureReport", "CapturedStep", "GraphBlock", "GraphInfo", "capture_graph"]
