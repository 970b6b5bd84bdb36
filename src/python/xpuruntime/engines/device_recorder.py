# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`DeviceRecorder`: what the devices of this process do, from the source that may be used beside PyTorch."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.runtime import profiler

if TYPE_CHECKING:
    from xpuruntime.pytorch.profiling.recording import KinetoRecording
    from xpuruntime.runtime.recording import Recording

__all__ = ["DeviceRecorder"]


class DeviceRecorder:
    """Records ranges of the host and the work of CUDA devices.

    CUPTI serves one user in a process, and PyTorch's profiler stays blind for as long as the process lives when it
    finds CUPTI taken at its first start. So, while a PyTorch that can profile CUDA is loaded, its profiler is the
    source; otherwise the core has CUPTI itself, and gives it back at the end.

    Parameters
    ----------
    devices : bool
        Whether to record devices at all.
    limit : int
        Ranges, pieces of work, and calls that are kept, of each.
    """

    def __init__(self, *, devices: bool = True, limit: int = profiler.LIMIT) -> None:
        self._devices, self._limit = devices, limit
        self._kineto: KinetoRecording | None = None
        self._notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Start.

        Raises
        ------
        InputError
            A recording goes on already.
        """
        self._notes = ()
        if not self._devices:
            profiler.start(devices=False, limit=self._limit)
            self._notes = ("ranges of the host only: the work of devices was not asked for",)
            return
        if not _torch_profiles_cuda():
            profiler.start(devices=True, limit=self._limit)
            return
        from xpuruntime.pytorch.profiling.recording import KinetoRecording

        try:
            kineto = KinetoRecording(self._limit)
        except InputError as error:
            profiler.start(devices=True, limit=self._limit)
            self._notes = (f"PyTorch's profiler cannot be asked for the work of devices: {error}",)
            return
        with contextlib.ExitStack() as undo:
            profiler.start(devices=False, limit=self._limit)
            undo.callback(profiler.stop)
            kineto.start()
            self._kineto = kineto
            undo.pop_all()

    def stop(self) -> Recording:
        """Wait for the devices, and return what was recorded.

        Raises
        ------
        InputError
            No recording goes on.
        CudaError
            A device failed; the recording has ended.
        """
        kineto, self._kineto = self._kineto, None
        if kineto is None:
            recording = profiler.stop()
        else:
            try:
                kineto.stop()
            finally:
                recording = profiler.stop()
            recording = kineto.added_to(recording)
        return msgspec.structs.replace(recording, notes=(*self._notes, *recording.notes))


def _torch_profiles_cuda() -> bool:
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    return getattr(version, "cuda", None) is not None and bool(torch.cuda.is_available())  # type: ignore[union-attr]
