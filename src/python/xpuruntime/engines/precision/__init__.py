# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conversion of an fp32 model to fp16 or bf16, and its comparison with the original on a probe input."""

from __future__ import annotations

from xpuruntime.engines.precision.compare import (
    TOLERANCES,
    OutputFigures,
    ProbeResult,
    Tolerance,
    compare_within,
)
from xpuruntime.engines.precision.conversion import ConvertedModel, KeptNode, convert
from xpuruntime.engines.precision.probe import probe_feeds, probe_shape, shapes_text
from xpuruntime.engines.precision.probe_sizes import names_in, unnamed_dimensions

__all__ = [
    "TOLERANCES",
    "ConvertedModel",
    "KeptNode",
    "OutputFigures",
    "ProbeResult",
    "Tolerance",
    "compare_within",
    "convert",
    "names_in",
    "probe_feeds",
    "probe_shape",
    "shapes_text",
    "unnamed_dimensions",
]
