# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inference: `InferenceSession` plans, loads, runs and explains; models are compiled and compared, runs profiled."""

from __future__ import annotations

from xpuruntime.inference.comparing import compare_engines
from xpuruntime.inference.comparison import Comparison
from xpuruntime.inference.compiling import compile_model
from xpuruntime.inference.plan_request import plan
from xpuruntime.inference.profiling import profile
from xpuruntime.inference.session import InferenceSession
from xpuruntime.inference.session_spec import SessionSpec

__all__ = ["Comparison", "InferenceSession", "SessionSpec", "compare_engines", "compile_model", "plan", "profile"]
