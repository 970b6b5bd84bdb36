# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conformance suites for authors of engines and kernels; the engines and kernels of this package pass them."""

from __future__ import annotations

from xpuruntime.testing.compile_conformance import CompileSuite
from xpuruntime.testing.conformance import EngineSuite
from xpuruntime.testing.op_arrays import NumpyArrays, TorchArrays
from xpuruntime.testing.op_suite import OpSuite, check_kernel, op_cases

__all__ = ["CompileSuite", "EngineSuite", "NumpyArrays", "OpSuite", "TorchArrays", "check_kernel", "op_cases"]
