# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for profiles."""

from typing import Any

#: Ranges, pieces of work and calls that a recording keeps, of each.
PROFILER_LIMIT: int

def profiler_active() -> bool:
    """Whether a recording goes on."""

def profiler_start(devices: bool, limit: int = ...) -> None:
    """Start a recording; see `xpuruntime.runtime.profiler`."""

def profiler_stop() -> dict[str, Any]:
    """End the recording and return it."""

def profiler_begin(name: str, category: str) -> int:
    """Begin a range on this thread and return its number; 0 while nothing is recorded."""

def profiler_end(range: int) -> None:
    """End a range; 0 is none."""
