# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An RMS norm on the CPU, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xpuruntime.ops.plugins import KernelBackend, PythonKernel

__all__ = ["NumpyBackend", "NumpyRmsNorm"]


class NumpyBackend(KernelBackend):
    """NumPy, on the CPU."""

    def __init__(self) -> None:
        super().__init__("example", "cpu", f"0.1.0, numpy {np.__version__}")


class NumpyRmsNorm(PythonKernel):
    """``s / sqrt(mean(s^2) + eps) * weight`` with ``s = x + residual``; sums squares in float64."""

    id = "example.numpy_rms_norm"
    op = "rms_norm"
    description = "an example of a kernel in Python: NumPy, with sums in float64"
    limits = "fp32 and fp64, any strides, with residual, weight and statistics"

    def supports(self, op: Mapping[str, Any]) -> tuple[bool, str]:
        """Refuse what is not float32 or float64."""
        dtype = op["operands"]["x"]["dtype"]
        if dtype not in ("float32", "float64"):
            return False, f"it computes float32 and float64, and this is {dtype}"
        return True, ""

    def prepare(  # a kernel with one way to do it has no use for `config`
        self,
        op: Mapping[str, Any],
        config: str,  # noqa: ARG002
    ) -> Callable[[Mapping[str, Any], int], None]:
        """Return what does it; all that it must know besides the tensors is epsilon."""
        epsilon = op["attributes"]["epsilon"]

        def run(operands: Mapping[str, Any], stream: int) -> None:  # noqa: ARG001 - there is none on the CPU
            views = {name: tensor.numpy() for name, tensor in operands.items()}
            s = views["x"] + views["residual"] if "residual" in views else views["x"]
            wide = s.astype(np.float64)
            rstd = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1) + epsilon)
            y = wide * rstd[:, None]
            if "weight" in views:
                y *= views["weight"]
            # Only now: `y` and `sum` may be where `x` and `residual` are.
            if "sum" in views:
                views["sum"][...] = s
            views["y"][...] = y
            if "rstd" in views:
                views["rstd"][...] = rstd

        return run
