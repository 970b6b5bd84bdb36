# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conditions of a measurement: what else the machine did, and at which clocks.

Read before and after the rounds, from files of Linux and from NVML where it is installed. What cannot be read is
``None``, which says nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from xpuruntime.measuring.nvml import Nvml, NvmlError
from xpuruntime.runtime.snapshot import machine_snapshot

__all__ = ["Conditions", "GpuClock", "Moment", "between", "moment"]


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
        found = []
        if self.load is not None and self.cores and max(self.load) > self.cores:
            found.append(f"the load was {max(self.load):.1f} on {self.cores} processors")
        if self.throttled_periods:
            found.append(f"the control group was throttled in {self.throttled_periods} periods")
        if self.steal is not None and self.steal > 0.01:
            found.append(f"{self.steal:.0%} of the processor time was stolen by the hypervisor")
        if self.cpu_mhz is not None and abs(self.cpu_mhz[1] / self.cpu_mhz[0] - 1) > 0.05:
            found.append(f"the processors' clock went from {self.cpu_mhz[0]:.0f} to {self.cpu_mhz[1]:.0f} MHz")
        found += [
            f"cuda:{gpu.index} ran at {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz: {', '.join(gpu.throttled_by)}"
            for gpu in self.gpus
            if gpu.throttled_by
        ]
        return found


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
    """Return throttled periods and microseconds of this process's control group, version 2 or 1."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                folders = (root / path.strip("/"), root / "cpu" / path.strip("/"), root, root / "cpu")
                stat = next((folder / "cpu.stat" for folder in folders if (folder / "cpu.stat").exists()), None)
                if stat is not None:
                    found |= {name: int(value) for name, value in map(str.split, stat.read_text().splitlines())}
    microseconds = found.get("throttled_usec")
    if microseconds is None and "throttled_time" in found:  # version 1, in nanoseconds
        microseconds = found["throttled_time"] // 1000
    return found.get("nr_throttled"), microseconds


def _ticks(stat: Path = Path("/proc/stat")) -> tuple[int, int] | None:
    """Return ticks of all processors, and those that were stolen."""
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
            seen = {one.pci_id.lower(): one.index for one in machine_snapshot().cuda}
            indices = seen or {address: index for index, address in enumerate(gpus)}
            found = [_gpu(nvml, gpus[address], index) for address, index in indices.items() if address in gpus]
    except NvmlError:
        return ()
    return tuple(one for one in found if one is not None)


def _gpu(nvml: Nvml, gpu: Any, index: int) -> GpuClock | None:
    try:
        now, most = nvml.sm_mhz(gpu)
    except NvmlError:
        return None
    return GpuClock(index=index, sm_mhz=now, max_sm_mhz=most, throttled_by=nvml.throttled_by(gpu))
