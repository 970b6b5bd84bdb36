# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's CUDA tensors in xpuruntime pools: `set_allocator`, `allocator_stats`, `memory_report`."""

from __future__ import annotations

from typing import Any

from xpuruntime.lazy_names import load_name as _load_name

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "AllocatorScope": "scope",
    "DeviceMemoryReport": "report",
    "allocator_stats": "api",
    "memory_report": "report",
    "reset_allocator": "api",
    "set_allocator": "api",
}

__all__ = [  # noqa: PLE0604, RUF100 - the names of _LAZY
    *sorted(_LAZY),
]


#: Former names of this package, each with its present one; they warn, and will be removed in 0.3.
_DEPRECATED = {"MemoryReport": "DeviceMemoryReport"}


def __getattr__(name: str) -> Any:
    return _load_name(__name__, name, _LAZY, deprecated=_DEPRECATED)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
