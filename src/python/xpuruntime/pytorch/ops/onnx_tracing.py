# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX tracing of xpuruntime's functions."""

from __future__ import annotations

import warnings

import torch

from xpuruntime.errors import XpuRuntimeWarning

__all__ = ["traced_for_onnx", "warn_dropped_in_onnx"]


def traced_for_onnx() -> bool:
    """Say whether a call is traced into an ONNX model, which has no xpuruntime operators."""
    return bool(torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export())


def warn_dropped_in_onnx(function: str, kernel: str) -> None:
    """Warn that a kernel which a call names is not in the ONNX model that the call is traced into."""
    if kernel:
        msg = (
            f"{function}(kernel={kernel!r}) is exported without its kernel: a call in an ONNX model names none. Fix: "
            "pass a policy to export, with a rule for the module that has it"
        )
        warnings.warn(msg, XpuRuntimeWarning, stacklevel=3)
