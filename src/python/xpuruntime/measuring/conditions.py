# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conditions of a measurement: what else the machine did, at which clocks, and the energy of GPUs (NVML)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.files.paths import reason_of
from xpuruntime.runtime.snapshot import machine_snapshot


class GpuClock(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's clock of its multiprocessors in MHz, the highest it has, and why it is lower."""

    index: int
    sm_mhz: int
    max_sm_mhz: int
    throttled_by: tuple[str, ...] = ()


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and clocks at one time."""

    seconds: float
    load: float | None = None
    throttled_periods: int | None = None
    throttled_us: int | None = None
    cpu_ticks: tuple[int, int] | None = None
    cpu_mhz: float | None = None
    gpus: tuple[GpuClock, ...] = ()


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine did between two moments."""

    seconds: float
    cores: int | None = None
    load: tuple[float, float] | None = None
    throttled_periods: int | None = None
    throttled_share: float | None = None
    steal: float | None = None
    cpu_mhz: tuple[float, float] | None = None
    gpus: tuple[GpuClock, ...] = ()

    def remarks(self) -> list[str]:
        """Return what may have disturbed the measurement, in words."""
        texts = []
        if self.load is not None and self.cores and max(self.load) > self.cores:
            texts.append(f"the load was {max(self.load):.1f} on {self.cores} processors")
        if self.throttled_periods:
            texts.append(f"the control group was throttled in {self.throttled_periods} periods")
        if self.steal is not None and self.steal > 0.01:
            texts.append(f"{self.steal:.0%} of the processor time was stolen by the hypervisor")
        if self.cpu_mhz is not None and abs(self.cpu_mhz[1] / self.cpu_mhz[0] - 1) > 0.05:
            texts.append(f"the processors' clock went from {self.cpu_mhz[0]:.0f} to {self.cpu_mhz[1]:.0f} MHz")
        texts += [
            f"cuda:{gpu.index} ran at {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz: {', '.join(gpu.throttled_by)}"
            for gpu in self.gpus
            if gpu.throttled_by
        ]
        return texts


def moment() -> Moment:
    """Read counters and clocks."""
    periods, microseconds = _throttling()
    load = None
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0]
    return Moment(
        seconds=time.monotonic(), load=load, throttled_periods=periods, throttled_us=microseconds, cpu_ticks=_ticks(),
        cpu_mhz=_cpu_mhz(), gpus=_gpus(),
    )  # fmt: skip


def between(before: Moment, after: Moment) -> Conditions:
    """Return what happened between two moments. Pure but for the number of processors."""
    seconds = after.seconds - before.seconds
    periods = share = steal = None
    if before.throttled_periods is not None and after.throttled_periods is not None:
        periods = after.throttled_periods - before.throttled_periods
    if before.throttled_us is not None and after.throttled_us is not None and seconds > 0:
        share = (after.throttled_us - before.throttled_us) / 1e6 / seconds
    if before.cpu_ticks is not None and after.cpu_ticks is not None:
        total = after.cpu_ticks[0] - before.cpu_ticks[0]
        steal = (after.cpu_ticks[1] - before.cpu_ticks[1]) / total if total else None
    both_loads = before.load is not None and after.load is not None
    both_clocks = before.cpu_mhz is not None and after.cpu_mhz is not None
    return Conditions(
        seconds=seconds, cores=os.cpu_count(), load=(before.load, after.load) if both_loads else None,  # type: ignore[arg-type]
        throttled_periods=periods, throttled_share=share, steal=steal,
        cpu_mhz=(before.cpu_mhz, after.cpu_mhz) if both_clocks else None, gpus=after.gpus,  # type: ignore[arg-type]
    )  # fmt: skip


def _throttling(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> tuple[int | None, int | None]:
    counters: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                folders = (root / path.strip("/"), root / "cpu" / path.strip("/"), root, root / "cpu")
                stat = next((folder / "cpu.stat" for folder in folders if (folder / "cpu.stat").exists()), None)
                if stat is not None:
                    counters |= {name: int(value) for name, value in map(str.split, stat.read_text().splitlines())}
    microseconds = counters.get("throttled_usec")
    if microseconds is None and "throttled_time" in counters:  # version 1, in nanoseconds
        microseconds = counters["throttled_time"] // 1000
    return counters.get("nr_throttled"), microseconds


def _ticks(stat: Path = Path("/proc/stat")) -> tuple[int, int] | None:
    try:
        # user, nice, system, idle, iowait, irq, softirq, steal; guest time is counted in user
        values = list(map(int, stat.read_text().splitlines()[0].split()[1:9]))
    except (OSError, ValueError, IndexError):
        return None
    return (sum(values), values[7]) if len(values) == 8 else None


def _cpu_mhz(folder: Path = Path("/sys/devices/system/cpu")) -> float | None:
    clocks = []
    with contextlib.suppress(OSError, ValueError):
        clocks = [int(path.read_text()) / 1000 for path in folder.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    return sum(clocks) / len(clocks) if clocks else None


def _gpus() -> tuple[GpuClock, ...]:
    """Return the clocks of the GPUs that CUDA shows, or of all where it shows none, as in a build without CUDA."""
    try:
        with Nvml() as nvml:
            gpus = nvml.gpus()
            seen = {gpu.pci_id.lower(): gpu.index for gpu in machine_snapshot().cuda}
            indices = seen or {address: index for index, address in enumerate(gpus)}
            counters = [_gpu(nvml, gpus[address], index) for address, index in indices.items() if address in gpus]
    except NvmlError:
        return ()
    return tuple(counter for counter in counters if counter is not None)


def _gpu(nvml: Nvml, gpu: Any, index: int) -> GpuClock | None:
    try:
        now, most = nvml.sm_mhz(gpu)
    except NvmlError:
        return None
    return GpuClock(index=index, sm_mhz=now, max_sm_mhz=most, throttled_by=nvml.throttled_by(gpu))


_FOLDER = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:[0-9]+")
_FIX = "Fix: take another objective"


class _Domain(NamedTuple):
    """A RAPL counter in microjoules, and where it begins again."""

    path: Path
    wraps_at: int


class EnergyMeter:
    """A counter that can be read again and again."""

    def __init__(self, domains: Sequence[_Domain] = (), gpu: tuple[Nvml, Any] | None = None) -> None:
        self._domains, self._gpu = tuple(domains), gpu

    def read(self) -> tuple[int, ...]:
        """Return the counters, for `joules`."""
        if self._gpu is not None:
            nvml, handle = self._gpu
            return (nvml.millijoules(handle),)
        return tuple(int(domain.path.read_text(encoding="ascii")) for domain in self._domains)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Return what was used between two readings; a counter that began again in between has done so once."""
        if self._gpu is not None:
            return (after[0] - before[0]) / 1e3
        used = (
            end - start + (domain.wraps_at if end < start else 0)
            for domain, start, end in zip(self._domains, before, after, strict=True)
        )
        return sum(used) / 1e6


def open_meter(device: str, folder: Path = _FOLDER, *, pci_id: str | None = None) -> EnergyMeter:
    """Return the meter of a device: RAPL for the CPU, NVML's counter of total energy for a CUDA device."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return _gpu_meter(device, int(index or 0), pci_id)
    if kind != "cpu":
        raise UnsupportedOperationError(f"energy of {device} cannot be measured: it has no counter. {_FIX}")
    domains = []
    try:
        for path in sorted(path for path in folder.glob("intel-rapl:*") if _PACKAGE.fullmatch(path.name)):
            int((path / "energy_uj").read_text(encoding="ascii"))
            wraps_at = int((path / "max_energy_range_uj").read_text(encoding="ascii"))
            domains.append(_Domain(path / "energy_uj", wraps_at))
    except OSError as error:
        raise UnsupportedOperationError(
            f"energy of the processor cannot be measured: {error.filename}: {reason_of(error)}. Fix: let this user "
            "read it, or take another objective"
        ) from error
    if not domains:
        raise UnsupportedOperationError(
            f"energy of the processor cannot be measured: this machine shows no RAPL counter in {folder}. {_FIX}"
        )
    return EnergyMeter(domains)


def _gpu_meter(device: str, index: int, pci_id: str | None) -> EnergyMeter:
    reason = f"energy of {device} cannot be measured"
    address = pci_id if pci_id is not None else _pci_id(index)
    if address is None:
        raise UnsupportedOperationError(f"{reason}: CUDA shows no such device here. {_FIX}")
    try:
        nvml = Nvml()
    except NvmlError as error:
        raise UnsupportedOperationError(f"{reason}: {error}. {_FIX}") from error
    try:
        handle = nvml.gpus().get(address.lower())
        if handle is None:
            raise NvmlError(f"NVML shows no GPU at {address}")
        nvml.millijoules(handle)
    except NvmlError as error:
        nvml.close()
        raise UnsupportedOperationError(f"{reason}: {error}. {_FIX}") from error
    return EnergyMeter(gpu=(nvml, handle))


def _pci_id(index: int) -> str | None:
    from xpuruntime.runtime.snapshot import machine_snapshot

    return next((gpu.pci_id for gpu in machine_snapshot().cuda if gpu.index == index), None)


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
        results = {}
        for index in range(count.value):
            gpu, pci = ctypes.c_void_p(), _PciInfo()
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(gpu))
            self._call("nvmlDeviceGetPciInfo_v3", gpu, ctypes.byref(pci))
            results[f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"] = gpu
        return results

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
