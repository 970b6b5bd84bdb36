# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels that an option of ONNX Runtime's CUDA provider chooses."""

from __future__ import annotations

__all__ = ["ATTENTION_BITS", "CONV_SEARCH", "by_option"]

#: Attention families to bits of the CUDA option ``sdpa_kernel``. Bit 16 (math) is never switched off by ONNX Runtime.
ATTENTION_BITS = {
    "flash_v2": 1,
    "efficient": 2,
    "trt_fused": 4,
    "cudnn": 8,
    "cudnn.sdpa": 8,
    "math": 16,
    "trt_flash": 32,
    "trt_cross": 64,
    "trt_causal": 128,
    "lean": 256,
    "decoder": 512,
}

#: Convolution families to the CUDA option ``cudnn_conv_algo_search``.
CONV_SEARCH = {
    "cudnn": "HEURISTIC",
    "cudnn_heuristic": "HEURISTIC",
    "cudnn_exhaustive": "EXHAUSTIVE",
    "cudnn_default": "DEFAULT",
}


def by_option(op: str, word: str, *, cuda: bool) -> bool:
    """Whether a family means ONNX Runtime's own kernels, which an option chooses. An id means an xpuruntime kernel."""
    known = ATTENTION_BITS if op == "attention" else CONV_SEARCH if op == "conv" else ()
    return cuda and "." not in word and word in known
