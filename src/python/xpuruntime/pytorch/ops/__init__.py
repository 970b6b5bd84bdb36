# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fused operations as operators of PyTorch: differentiable, and visible to ``torch.compile``.

They are registered with PyTorch's dispatcher in the namespace ``xpuruntime``, so that what is compiled or exported
keeps them, and the active policy chooses their kernel whenever they run.

Examples
--------
>>> import torch
>>> from xpuruntime.pytorch.ops import fused_attention
>>> q = torch.ones(1, 2, 3, 4)
>>> fused_attention(q, q, q, is_causal=True).shape
torch.Size([1, 2, 3, 4])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.pytorch.ops.attention import fused_attention
    from xpuruntime.pytorch.ops.norms import fused_layernorm, fused_rms_norm

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "fused_attention": "attention",
    "fused_layernorm": "norms",
    "fused_rms_norm": "norms",
}

__all__ = ["fused_attention", "fused_layernorm", "fused_rms_norm"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
