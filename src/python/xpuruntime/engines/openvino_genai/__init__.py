# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""OpenVINO GenAI: language models in a folder of OpenVINO, on the CPU."""

from __future__ import annotations

from xpuruntime.engines.openvino_genai.engine import OpenVinoGenAiEngine

__all__ = ["OpenVinoGenAiEngine"]
