# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Single operations on arrays of any library, by the kernel that a policy asks for.

Every function takes NumPy, PyTorch, CuPy and other DLPack arrays and `Tensor`, and gives back arrays of the library of
its first argument. Nothing is converted or copied: what does not fit is refused by name. Which kernel runs is decided
by the call's own ``kernel=``, the ``policy=`` given, or the ambient policy of `use_policy`; `decisions` says what was
decided, and why.
"""

from __future__ import annotations

from xpuruntime.ops.attention import attention, attention_backward
from xpuruntime.ops.call_context import current_policy, use_policy
from xpuruntime.ops.decision_log import KernelInfo, clear_decisions, decisions, kernels
from xpuruntime.ops.norms import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from xpuruntime.ops.products import conv2d, conv2d_input_gradient, conv2d_weight_gradient, matmul

__all__ = [
    "KernelInfo",
    "attention",
    "attention_backward",
    "clear_decisions",
    "conv2d",
    "conv2d_input_gradient",
    "conv2d_weight_gradient",
    "current_policy",
    "decisions",
    "kernels",
    "layer_norm",
    "layer_norm_backward",
    "matmul",
    "rms_norm",
    "rms_norm_backward",
    "use_policy",
]
