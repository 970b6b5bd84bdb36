# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inference: `InferenceSession` plans, loads, runs and explains; models are compiled and compared, runs profiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.inference.comparing import compare_engines
    from xpuruntime.inference.comparing_generation import GenerationComparison, compare_generations
    from xpuruntime.inference.comparison import Comparison
    from xpuruntime.inference.compiling import compile_model
    from xpuruntime.inference.generation import Generation, GenerationSession
    from xpuruntime.inference.plan_request import plan
    from xpuruntime.inference.profiling import profile
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.inference.session_spec import SessionSpec

__all__ = [
    "Comparison",
    "Generation",
    "GenerationComparison",
    "GenerationSession",
    "InferenceSession",
    "SessionSpec",
    "compare_engines",
    "compare_generations",
    "compile_model",
    "plan",
    "profile",
]

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "Comparison": "comparison",
    "Generation": "generation",
    "GenerationComparison": "comparing_generation",
    "GenerationSession": "generation",
    "InferenceSession": "session",
    "SessionSpec": "session_spec",
    "compare_engines": "comparing",
    "compare_generations": "comparing_generation",
    "compile_model": "compiling",
    "plan": "plan_request",
    "profile": "profiling",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
