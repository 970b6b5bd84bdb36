# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The core's recorder of ranges and device work: `start`, `stop`, and `profiled` for a range.

One recording at a time in a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime import _core
from xpuruntime.runtime.device_recording import DeviceRecording, DeviceWork, HostCall, Range

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["LIMIT", "profiled", "start", "stop"]

#: Ranges, pieces of work and calls that are kept, of each, unless somebody says otherwise.
LIMIT: int = _core.PROFILER_LIMIT


def start(*, devices: bool = True, limit: int = LIMIT) -> None:
    """Start a recording.

    Parameters
    ----------
    devices : bool
        Whether to record the work of CUDA devices, by CUPTI or, where that cannot be had, by CUDA events around the
        kernels that this library dispatches.
    limit : int
        Ranges, pieces of work, and calls that are kept, of each.

    Raises
    ------
    InputError
        A recording goes on already.
    """
    _core.profiler_start(devices, limit)


def stop() -> DeviceRecording:
    """Wait for the devices, end the recording and return it."""
    found = _core.profiler_stop()
    notes = []
    if found["source"] == "events":
        notes.append(
            "device work is timed by CUDA events around kernels that xpuruntime dispatches, and nothing else of a "
            f"device is seen: {found['reason']}"
        )
    elif found["reason"]:
        notes.append(f"ranges of the host only: {found['reason']}")
    if found["dropped"]:
        notes.append(f"{found['dropped']} records are lost: more came than are kept. Profile less, or raise the limit")
    return DeviceRecording(
        source=found["source"],
        notes=tuple(notes),
        start_ns=found["start_ns"],
        end_ns=found["end_ns"],
        ranges=tuple(map(Range._make, found["ranges"])),
        work=tuple(map(DeviceWork._make, found["work"])),
        calls=tuple(map(HostCall._make, found["calls"])),
        dropped=found["dropped"],
    )


class profiled:  # noqa: N801 - used like a function
    """A range around a ``with`` block; costs next to nothing while nobody records."""

    __slots__ = ("_category", "_id", "_name")

    def __init__(self, name: str, category: str = "range") -> None:
        self._name, self._category, self._id = name, category, 0

    def __enter__(self) -> None:
        self._id = _core.profiler_begin(self._name, self._category)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _core.profiler_end(self._id)
