# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Device recording: host ranges and device work, as a profiler recorded them.

All times are nanoseconds since the epoch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

__all__ = ["DeviceRecording", "DeviceWork", "HostCall", "Range", "WorkKind", "WorkSource"]

WorkKind = Literal["kernel", "copy", "fill", "wait", "allocation", "release"]
WorkSource = Literal["none", "cupti", "kineto", "events"]


class Range(NamedTuple):
    """A named piece of the host's time."""

    id: int
    parent: int
    name: str
    category: str
    thread: int
    start_ns: int
    end_ns: int
    finished: bool = True


class DeviceWork(NamedTuple):
    """One piece of work of a device, or what the host waited for one."""

    kind: WorkKind
    name: str
    device: int
    stream: int
    start_ns: int
    end_ns: int
    range: int = 0
    correlation: int = 0
    graph: int = 0
    bytes: int = 0
    source: str = ""
    destination: str = ""

    @property
    def us(self) -> float:
        """Microseconds."""
        return (self.end_ns - self.start_ns) / 1000


class HostCall(NamedTuple):
    """A call of CUDA's by which the host gave work to a device, or waited for it."""

    name: str
    thread: int
    start_ns: int
    end_ns: int
    correlation: int


class DeviceRecording(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded."""

    source: WorkSource = "none"
    notes: tuple[str, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    ranges: tuple[Range, ...] = ()
    work: tuple[DeviceWork, ...] = ()
    calls: tuple[HostCall, ...] = ()
    dropped: int = 0
