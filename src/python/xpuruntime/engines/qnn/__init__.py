# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Qualcomm NPUs through QNN: ONNX Runtime's plugin provider, on a device or on the HTP simulator of x86-64."""

from __future__ import annotations

from xpuruntime.engines.qnn.engine import QnnEngine

__all__ = ["QnnEngine"]
