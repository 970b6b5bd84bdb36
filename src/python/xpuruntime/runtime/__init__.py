# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Runtime: devices, streams, memory, tensors, libraries, and the `Machine` snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.lazy_names import lazy as _lazy

if TYPE_CHECKING:
    from xpuruntime.runtime.device import (
        Device,
        get_all_devices,
        get_current_device,
        get_device_count,
        set_current_device,
        synchronize,
    )
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.runtime.memory import Buffer, MemoryPool, MemoryReport, MemoryStats, memory_report
    from xpuruntime.runtime.profiler import profiled
    from xpuruntime.runtime.snapshot import load_machine, machine_snapshot
    from xpuruntime.runtime.stream import Event, Graph, Stream, Tensor

__all__ = [
    "Buffer",
    "Device",
    "Event",
    "Graph",
    "Machine",
    "MemoryPool",
    "MemoryReport",
    "MemoryStats",
    "Stream",
    "Tensor",
    "get_all_devices",
    "get_current_device",
    "get_device_count",
    "load_machine",
    "machine_snapshot",
    "memory_report",
    "profiled",
    "set_current_device",
    "synchronize",
]

#: Public name to the module that has it; loaded on first use.
_LAZY = {
    "Buffer": "memory",
    "Device": "device",
    "Event": "stream",
    "Graph": "stream",
    "Machine": "machine",
    "MemoryPool": "memory",
    "MemoryReport": "memory",
    "MemoryStats": "memory",
    "Stream": "stream",
    "Tensor": "stream",
    "get_all_devices": "device",
    "get_current_device": "device",
    "get_device_count": "device",
    "load_machine": "snapshot",
    "machine_snapshot": "snapshot",
    "memory_report": "memory",
    "profiled": "profiler",
    "set_current_device": "device",
    "synchronize": "device",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _LAZY)
