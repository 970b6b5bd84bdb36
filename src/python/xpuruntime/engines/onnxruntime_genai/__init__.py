# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX Runtime GenAI: language models in a folder with ``genai_config.json``, on the CPU and on CUDA."""

from __future__ import annotations

from xpuruntime.engines.onnxruntime_genai.engine import OnnxRuntimeGenAiEngine

__all__ = ["OnnxRuntimeGenAiEngine"]
