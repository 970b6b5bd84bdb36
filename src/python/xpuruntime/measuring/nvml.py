# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Nvml`: NVIDIA's management library, which needs no CUDA context. GPUs are found by their PCI address.

NVML counts the GPUs of the machine, and CUDA those that the process sees, in an order of its own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Nvml", "NvmlError"]

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1
#: Bits of reasons for lower clocks. An idle GPU and clocks that an application has set slow nothing down unseen.
_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


class NvmlError(Exception):
    """NVML cannot be used, or does not answer; the message says why."""


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class Nvml:
    """NVML, opened."""

    def __init__(self, library: str = _LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"{library} cannot be loaded") from error
        self._open = False
        self._call("nvmlInit_v2")
        self._open = True

    def gpus(self) -> dict[str, ctypes.c_void_p]:
        """Return the GPUs of the machine by their PCI address, as CUDA writes it: ``"0000:17:00.0"``."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = {}
        for index in range(count.value):
            gpu, pci = ctypes.c_void_p(), _PciInfo()
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(gpu))
            self._call("nvmlDeviceGetPciInfo_v3", gpu, ctypes.byref(pci))
            found[f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"] = gpu
        return found

    def millijoules(self, gpu: ctypes.c_void_p) -> int:
        """Return the energy that a GPU has used since the driver was loaded. Volta and later have this counter."""
        used = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", gpu, ctypes.byref(used))
        return used.value

    def sm_mhz(self, gpu: ctypes.c_void_p) -> tuple[int, int]:
        """Return the clock of the multiprocessors, and the highest that it has."""
        now, most = ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", gpu, _SM_CLOCK, ctypes.byref(now))
        self._call("nvmlDeviceGetMaxClockInfo", gpu, _SM_CLOCK, ctypes.byref(most))
        return now.value, most.value

    def throttled_by(self, gpu: ctypes.c_void_p) -> tuple[str, ...]:
        """Return the reasons for a lower clock; none where the driver does not tell."""
        bits = ctypes.c_ulonglong()
        try:
            self._call("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, ctypes.byref(bits))
        except NvmlError:
            return ()
        return tuple(name for bit, name in _REASONS.items() if bits.value & bit)

    def close(self) -> None:
        """Give the library back; once is enough."""
        if self._open:
            self._open = False
            self._library.nvmlShutdown()

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise NvmlError(f"this version of NVML has no {name}") from error
        if status != 0:
            raise NvmlError(f"{name} returned {status}")
