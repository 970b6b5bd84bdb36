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
from typing import Any

from xpuruntime.lazy_names import load_name as _load_name
from xpuruntime.lazy_names import refuse_rest as _refuse_rest

_known = len(_sys.modules)
try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    if _missing.name != "torch":
        raise
    from xpuruntime.runtime.install_commands import install_command as _install_command

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
    "LayerParity": "layer_parity.parity",
    "memory_report": "allocator.report",
    "Parity": "layer_parity.parity",
    "parity": "layer_parity.parity",
    "profile": "profiling.profile",
    "register_flash_attention": "attention.flash_impl",
    "reset_allocator": "allocator.api",
    "set_allocator": "allocator.api",
    "set_kernel_policy": "dispatch.policy_scope",
    "StepCandidate": "step_tuning",
    "tune": "step_tuning",
    "TunedStep": "step_tuning",
}

__all__ = [  # noqa: PLE0604, RUF100 - the names of _LAZY, and the packages
    *sorted(_LAZY),
]

#: Names of the original design that are spelled otherwise, and how.
_REPLACED = {
    "CUDAGraphWrapper": "use step = capture_graph(fn), or `with capture_graph() as graph` and graph.replay()",
    "XpuRuntimeAllocator": "use set_allocator() and reset_allocator()",
    "fused_attention": "use xpuruntime.pytorch.ops.fused_attention",
    "fused_layernorm": "use xpuruntime.pytorch.ops.fused_layernorm",
}

#: Former names of this package, each with its present one; they warn, and will be removed in 0.3.
_DEPRECATED = {"escapes": "coverage_gaps"}


def __getattr__(name: str) -> Any:
    return _load_name(__name__, name, _LAZY, _REPLACED, _DEPRECATED)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
