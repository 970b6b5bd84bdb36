# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""OpenVINO behind the engine interface. Importing this imports no vendor package."""

from __future__ import annotations

from xpuruntime.engines.openvino.engine import OpenVinoEngine

__all__ = ["OpenVinoEngine"]
