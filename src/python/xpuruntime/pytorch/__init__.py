# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The policies of xpuruntime on PyTorch's own operations: training code stays as it is, and its kernels are chosen.

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

from typing import Any

from xpuruntime.lazy_names import load_name as _load_name

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    if _missing.name != "torch":
        raise
    from xpuruntime.runtime.extras import install_command as _install_command

    raise ImportError(
        f"xpuruntime.pytorch requires PyTorch. Install with: {_install_command('torch')}", name="torch"
    ) from None


#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "allocator_stats": "allocator",
    "autocast": "autocasting",
    "capture_graph": "capture",
    "clear_kernel_policy": "policy",
    "escapes": "escaping",
    "explain": "explaining.block",
    "Explanation": "explaining.explanation",
    "export": "exporting",
    "Exported": "exporting",
    "get_kernel_policy": "policy",
    "kernel_policy": "policy",
    "LayerParity": "comparing.parity",
    "memory_report": "memory_reporting",
    "Parity": "comparing.parity",
    "parity": "comparing.parity",
    "profile": "profiling.block",
    "register_flash_attention": "attention.flash_impl",
    "reset_allocator": "allocator",
    "set_allocator": "allocator",
    "set_kernel_policy": "policy",
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


def __getattr__(name: str) -> Any:
    return _load_name(__name__, name, _LAZY, _REPLACED)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
