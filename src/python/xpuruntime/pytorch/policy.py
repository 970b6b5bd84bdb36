# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies of PyTorch's operations, as a module: `set_kernel_policy`, `kernel_policy`, `get_kernel_policy`."""

from __future__ import annotations

from xpuruntime.pytorch.dispatch.policy_scope import (
    clear_kernel_policy,
    get_kernel_policy,
    kernel_policy,
    set_kernel_policy,
)

__all__ = ["clear_kernel_policy", "get_kernel_policy", "kernel_policy", "set_kernel_policy"]
