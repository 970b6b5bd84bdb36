# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Devices`: watches what the device of a session does while an instrumented copy runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.device_recorder import DeviceRecorder
from xpuruntime.engines.onnxruntime.observing.device_work import DeviceTimes, with_device_times
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.runtime.profiler import Mark

if TYPE_CHECKING:
    from types import TracebackType

    from xpuruntime.engines.onnxruntime.observing.profile import NodeProfile
    from xpuruntime.runtime.profiler import DeviceRecording

__all__ = ["Devices"]


class Devices:
    """A ``with`` block in which devices are watched; on the CPU nothing is done.

    What goes wrong is noted, and the pass goes on without the times of devices.
    """

    def __init__(self, device: str) -> None:
        self._recorder = DeviceRecorder() if device.startswith("cuda") else None
        self._recording: DeviceRecording | None = None
        self._began_ns: int | None = None
        self._notes: list[str] = []

    def _enter(self) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.start()
        except XpuRuntimeError as error:
            self._recorder = None
            self._notes.append(f"what the device did is not seen: {error}")

    def _exit(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._recorder is None:
            return
        try:
            self._recording = self._recorder.stop()
        except XpuRuntimeError as failed:
            self._notes.append(f"what the device did is not seen: {failed}")

    def _abandon(self) -> None:
        if self._recorder is not None:
            self._recorder.abandon()

    __enter__ = _core.guarded(_enter, _abandon)
    __exit__ = _core.guarded(_exit, _abandon)

    def begin_of(self, session: Any) -> None:
        """Ask a session when the clock of its profile began; before its profile is ended."""
        read = getattr(session, "get_profiling_start_time_ns", None)
        self._began_ns = None if read is None else int(read())

    def marks(self, profile: NodeProfile) -> list[Mark]:
        """Return the nodes of the counted runs, for a trace; none where nobody knows when the profile began."""
        began = self._began_ns
        if began is None:
            return []
        return [
            Mark(
                "nodes of ONNX Runtime",
                one.name,
                began + round(one.start_us * 1000),
                began + round(one.end_us * 1000),
                one.thread,
                {"op": one.op, "provider": one.provider},
            )
            for one in profile.spans
        ]

    def added_to(self, profile: NodeProfile) -> DeviceTimes:
        """Return a profile with what devices did, or as it is."""
        recording = self._recording
        notes = list(self._notes)
        if recording is not None:
            notes += recording.notes
            if self._began_ns is None:
                notes.append(
                    "this ONNX Runtime does not say when its profile began: device work is attributed to no node"
                )
            elif recording.source in ("cupti", "kineto"):
                found = with_device_times(profile, recording, self._began_ns)
                return found._replace(notes=(*notes, *found.notes))
        return DeviceTimes(profile, (), (), (), tuple(notes))
