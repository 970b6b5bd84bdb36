# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels for xpuruntime in NumPy, in Triton and in C++."""

from __future__ import annotations

from pathlib import Path

from example_kernels.numpy_rms_norm import NumpyBackend, NumpyRmsNorm
from example_kernels.triton_layer_norm import TritonBackend, TritonLayerNorm
from xpuruntime.ops import plugins

__all__ = ["register"]


def register() -> None:
    """Register all of them; the entry point ``xpuruntime.kernels`` names this function."""
    plugins.register(NumpyBackend(), NumpyRmsNorm())
    plugins.register(TritonBackend(), TritonLayerNorm())
    plugins.load_library(Path(__file__).with_name("example_native.so"))
