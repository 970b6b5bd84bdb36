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
    """A named piece of the host's time.

    Attributes
    ----------
    id : int
        Positive.
    parent : int
        The range around it, of the same thread; 0: none.
    name, category : str
        The category is ``"kernel"`` for what `xpuruntime.ops` and xpuruntime operators ran, ``"run"`` for runs of
        sessions, ``"range"`` for ranges of the program, ``"torch"`` for operators of PyTorch's.
    thread : int
        As the system numbers threads.
    start_ns, end_ns : int
    finished : bool
        False where it went on when the recording ended.
    """

    id: int
    parent: int
    name: str
    category: str
    thread: int
    start_ns: int
    end_ns: int
    finished: bool = True


class DeviceWork(NamedTuple):
    """One piece of work of a device, or what the host waited for one.

    Attributes
    ----------
    kind : {"kernel", "copy", "fill", "wait", "allocation", "release"}
    name : str
        Of a kernel; else what was done.
    device : int
        CUDA index.
    stream : int
        As the recorder numbers streams.
    start_ns, end_ns : int
    range : int
        The innermost range in which the host started it; 0: none.
    correlation : int
        The same as of the `HostCall` that started it; 0: not known.
    graph : int
        The CUDA graph that it is a node of; 0: none.
    bytes : int
    source, destination : str
        Of a copy, such as ``"host (pinned)"`` and ``"device"``; a fill or an allocation has a destination.
    """

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
    """A call of CUDA's by which the host gave work to a device, or waited for it.

    Attributes
    ----------
    name : str
        Such as ``"cudaLaunchKernel"``.
    thread : int
        As the system numbers threads; 0: not known.
    start_ns, end_ns : int
    correlation : int
    """

    name: str
    thread: int
    start_ns: int
    end_ns: int
    correlation: int


class DeviceRecording(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded.

    Attributes
    ----------
    source : {"none", "cupti", "kineto", "events"}
        Where the work of devices comes from: nowhere, CUPTI, PyTorch's profiler, or CUDA events around kernels that
        this library dispatches.
    notes : tuple of str
        What could not be recorded, and why.
    start_ns, end_ns : int
    ranges : tuple of Range
        In the order in which they began.
    work : tuple of DeviceWork
        In the order in which it began.
    calls : tuple of HostCall
    dropped : int
        Records that came after the limit, and are lost.
    """

    source: WorkSource = "none"
    notes: tuple[str, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    ranges: tuple[Range, ...] = ()
    work: tuple[DeviceWork, ...] = ()
    calls: tuple[HostCall, ...] = ()
    dropped: int = 0
