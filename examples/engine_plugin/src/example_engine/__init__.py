# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX's own reference evaluator as an engine: slow, exact, and short enough to be read at once."""

from __future__ import annotations

from example_engine.engine import ReferenceEngine

__all__ = ["ReferenceEngine"]
