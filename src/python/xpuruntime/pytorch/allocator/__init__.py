# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's CUDA tensors in xpuruntime pools: `set_allocator`, `allocator_stats`, `memory_report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.pytorch.allocator.api import allocator_stats, reset_allocator, set_allocator
    from xpuruntime.pytorch.allocator.report import DeviceMemoryReport, memory_report
    from xpuruntime.pytorch.allocator.scope import AllocatorScope

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "AllocatorScope": "scope",
    "DeviceMemoryReport": "report",
    "allocator_stats": "api",
    "memory_report": "report",
    "reset_allocator": "api",
    "set_allocator": "api",
}

__all__ = [
    "AllocatorScope",
    "DeviceMemoryReport",
    "allocator_stats",
    "memory_report",
    "reset_allocator",
    "set_allocator",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
