# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conversion of an fp32 model to fp16 or bf16, and its comparison with the original on a probe input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.engines.precision.conversion import ConvertedModel, KeptNode, convert
    from xpuruntime.engines.precision.probe import (
        names_in,
        probe_feeds,
        probe_shape,
        probing,
        shapes_text,
        unnamed_dimensions,
    )

__all__ = [
    "ConvertedModel",
    "KeptNode",
    "convert",
    "names_in",
    "probe_feeds",
    "probe_shape",
    "probing",
    "shapes_text",
    "unnamed_dimensions",
]

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "ConvertedModel": "conversion",
    "KeptNode": "conversion",
    "convert": "conversion",
    "names_in": "probe",
    "probe_feeds": "probe",
    "probe_shape": "probe",
    "probing": "probe",
    "shapes_text": "probe",
    "unnamed_dimensions": "probe",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
