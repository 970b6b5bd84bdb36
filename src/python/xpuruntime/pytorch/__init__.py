# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel policies on PyTorch's own operations: training code stays as it is, and its kernels are chosen.

Requires PyTorch 2.11 or newer: ``pip install "xpuruntime[torch]"``.

Examples
--------
>>> import xpuruntime.pytorch as xrt_torch
>>> xrt_torch.set_kernel_policy(matmul="cpu.blas")
>>> xrt_torch.get_kernel_policy().matmul
'cpu.blas'
>>> xrt_torch.clear_kernel_policy()
"""

from __future__ import annotations

import sys as _sys
from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy
from xpuruntime.lazy_names import refuse_rest as _refuse_rest
from xpuruntime.pytorch.import_hook import WhenImported as _WhenImported

if TYPE_CHECKING:
    from xpuruntime.pytorch import allocator as allocator
    from xpuruntime.pytorch import ops as ops
    from xpuruntime.pytorch import policy as policy
    from xpuruntime.pytorch import profiling as profiling
    from xpuruntime.pytorch.allocator.api import allocator_stats, reset_allocator, set_allocator
    from xpuruntime.pytorch.allocator.report import memory_report
    from xpuruntime.pytorch.amp import autocast
    from xpuruntime.pytorch.attention.flash_impl import register_flash_attention
    from xpuruntime.pytorch.capture import capture_graph
    from xpuruntime.pytorch.coverage.gaps import CoverageGap, coverage_gaps
    from xpuruntime.pytorch.dispatch.policy_scope import (
        clear_kernel_policy,
        get_kernel_policy,
        kernel_policy,
        set_kernel_policy,
    )
    from xpuruntime.pytorch.explanation.explain import explain
    from xpuruntime.pytorch.explanation.explanation import Explanation
    from xpuruntime.pytorch.exporter import Exported, export
    from xpuruntime.pytorch.generation.capture import capture_decode
    from xpuruntime.pytorch.generation.logprobs import logprobs_of
    from xpuruntime.pytorch.layer_parity.parity import parity
    from xpuruntime.pytorch.layer_parity.result import LayerParity, Parity
    from xpuruntime.pytorch.profiling.profile import profile
    from xpuruntime.pytorch.rank_agreement import RankAgreement
    from xpuruntime.pytorch.step_tuning.result import StepCandidate, TunedStep
    from xpuruntime.pytorch.step_tuning.tune import tune
    from xpuruntime.pytorch.training_lock import lock
    from xpuruntime.pytorch.weights import LinearWeights, WeightTraffic, quantize

_known = len(_sys.modules)
try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    if _missing.name != "torch":
        raise
    from xpuruntime.runtime.packages import install_command as _install_command

    raise ImportError(
        f"xpuruntime.pytorch requires PyTorch. Install with: {_install_command('torch')}", name="torch"
    ) from None
except Exception as _error:
    _refuse_rest(__name__, _known, _error)
    raise


#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "allocator_stats": "allocator.api",
    "autocast": "amp",
    "capture_decode": "generation.capture",
    "capture_graph": "capture",
    "clear_kernel_policy": "dispatch.policy_scope",
    "coverage_gaps": "coverage.gaps",
    "CoverageGap": "coverage.gaps",
    "explain": "explanation.explain",
    "Explanation": "explanation.explanation",
    "export": "exporter",
    "Exported": "exporter",
    "get_kernel_policy": "dispatch.policy_scope",
    "kernel_policy": "dispatch.policy_scope",
    "lock": "training_lock",
    "LayerParity": "layer_parity.result",
    "LinearWeights": "weights",
    "logprobs_of": "generation.logprobs",
    "memory_report": "allocator.report",
    "Parity": "layer_parity.result",
    "parity": "layer_parity.parity",
    "profile": "profiling.profile",
    "quantize": "weights",
    "RankAgreement": "rank_agreement",
    "register_flash_attention": "attention.flash_impl",
    "reset_allocator": "allocator.api",
    "set_allocator": "allocator.api",
    "set_kernel_policy": "dispatch.policy_scope",
    "StepCandidate": "step_tuning",
    "tune": "step_tuning",
    "TunedStep": "step_tuning",
    "WeightTraffic": "weights",
}

__all__ = [
    "CoverageGap",
    "Explanation",
    "Exported",
    "LayerParity",
    "LinearWeights",
    "Parity",
    "RankAgreement",
    "StepCandidate",
    "TunedStep",
    "WeightTraffic",
    "allocator_stats",
    "autocast",
    "capture_decode",
    "capture_graph",
    "clear_kernel_policy",
    "coverage_gaps",
    "explain",
    "export",
    "get_kernel_policy",
    "kernel_policy",
    "lock",
    "logprobs_of",
    "memory_report",
    "parity",
    "profile",
    "quantize",
    "register_flash_attention",
    "reset_allocator",
    "set_allocator",
    "set_kernel_policy",
    "tune",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)


def _define_attention(_: object = None) -> None:
    from xpuruntime.pytorch.ops import attention_operator  # noqa: F401 - a FLOP counter copies the formulas of operators


_FLOP_COUNTER = "torch.utils.flop_counter"
if _FLOP_COUNTER in _sys.modules:
    _define_attention()
else:
    _WhenImported(_FLOP_COUNTER, _define_attention)
