# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`DeviceRecorder`: what the devices of this process do, from the source that may be used beside PyTorch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.runtime import profiler
from xpuruntime.runtime.interruptible_waits import uninterrupted

if TYPE_CHECKING:
    from xpuruntime.pytorch.profiling.kineto_recording import KinetoRecording
    from xpuruntime.runtime.profiler import DeviceRecording

__all__ = ["DeviceRecorder"]


class DeviceRecorder:
    """Records ranges of the host and the work of CUDA devices.

    CUPTI serves one user in a process, and PyTorch's profiler stays blind for as long as the process lives when it
    finds CUPTI taken at its first start. So, while a PyTorch that can profile CUDA is loaded, its profiler is the
    source; otherwise the core has CUPTI itself, and gives it back at the end.
    """

    def __init__(self, *, devices: bool = True, limit: int = profiler.LIMIT) -> None:
        self._devices, self._limit = devices, limit
        self._kineto: KinetoRecording | None = None
        self._started = False
        self._notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Start. Where this is interrupted, `abandon` it."""
        self._notes = ()
        if not self._devices:
            self._start(devices=False)
            self._notes = ("ranges of the host only: the work of devices was not asked for",)
            return
        if not _torch_profiles_cuda():
            self._start(devices=True)
            return
        from xpuruntime.pytorch.profiling.kineto_recording import KinetoRecording

        try:
            kineto = KinetoRecording(self._limit)
        except InputError as error:
            self._start(devices=True)
            self._notes = (f"PyTorch's profiler cannot be asked for the work of devices: {error}",)
            return
        self._start(devices=False)
        self._kineto = kineto
        try:
            kineto.start()
        except BaseException:
            self.abandon()
            raise

    def _start(self, *, devices: bool) -> None:
        def start() -> None:
            profiler.start(devices=devices, limit=self._limit)
            self._started = True

        uninterrupted(start)

    def _stop(self) -> DeviceRecording:
        def stop() -> DeviceRecording:
            self._started = False
            return profiler.stop()

        return uninterrupted(stop)

    def abandon(self) -> None:
        """End the recording, at whatever point `start` or `stop` was interrupted. Idempotent."""
        try:
            if self._kineto is not None:
                self._kineto.abandon()
                self._kineto = None
        finally:
            if self._started:
                self._stop()

    def stop(self) -> DeviceRecording:
        """Wait for the devices, and return what was recorded."""
        kineto = self._kineto
        if kineto is None:
            recording = self._stop()
        else:
            try:
                kineto.stop()
                self._kineto = None
            finally:
                recording = self._stop()
            recording = kineto.added_to(recording)
        return msgspec.structs.replace(recording, notes=(*self._notes, *recording.notes))


def _torch_profiles_cuda() -> bool:
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    return getattr(version, "cuda", None) is not None and bool(torch.cuda.is_available())  # type: ignore[union-attr]
