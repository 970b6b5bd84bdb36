# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""int8: calibration samples, and float models quantized in the form that each engine needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.engines.quantization.calibration import Calibration
    from xpuruntime.engines.quantization.judge import refuse_int8, uses_calibration
    from xpuruntime.engines.quantization.quantized import LeftNode, QuantizedModel, quantize
    from xpuruntime.engines.quantization.style import STYLES, Style, in_source_terms, source_tensor

__all__ = [
    "STYLES",
    "Calibration",
    "LeftNode",
    "QuantizedModel",
    "Style",
    "in_source_terms",
    "quantize",
    "refuse_int8",
    "source_tensor",
    "uses_calibration",
]

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "STYLES": "style",
    "Calibration": "calibration",
    "LeftNode": "quantized",
    "QuantizedModel": "quantized",
    "Style": "style",
    "in_source_terms": "style",
    "quantize": "quantized",
    "refuse_int8": "judge",
    "source_tensor": "style",
    "uses_calibration": "judge",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
