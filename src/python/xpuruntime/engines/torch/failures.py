# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exceptions of PyTorch as xpuruntime errors."""

from __future__ import annotations

from xpuruntime.errors import CudaError, EngineFailed, OutOfMemoryError, UnsupportedOperationError, XpuRuntimeError

__all__ = ["translate"]


def translate(error: Exception, *, doing: str, device: str) -> XpuRuntimeError:
    """Return `error` as an xpuruntime error, saying what was being done."""
    if isinstance(error, XpuRuntimeError):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{doing} on {device}: {' '.join(lines[:2]) or type(error).__name__}"
    name = type(error).__name__
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return OutOfMemoryError(f"{text}. Use a smaller batch", engine="torch", device=device)
    if name in ("AcceleratorError", "CudaError") or "CUDA error" in text:
        return CudaError(text, engine="torch", device=device)
    if "deterministic" in text:
        return UnsupportedOperationError(
            f"{text}. Leave execution.determinism out, or use an operator that has a deterministic form",
            engine="torch",
            device=device,
        )
    return EngineFailed(text, engine="torch", device=device)
