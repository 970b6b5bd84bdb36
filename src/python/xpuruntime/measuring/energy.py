# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EnergyMeter`: joules that a processor or a GPU has used, where a counter of the machine can be read.

Counters are of whole packages and boards: what other processes use meanwhile is in them.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.files.paths import reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EnergyMeter", "open_meter"]

_FOLDER = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:[0-9]+")
_NVML = "libnvidia-ml.so.1"
_FIX = "Fix: take another objective"


class _Domain(NamedTuple):
    """A RAPL counter in microjoules, and where it begins again."""

    path: Path
    wraps_at: int


class EnergyMeter:
    """A counter that can be read again and again."""

    def __init__(self, domains: Sequence[_Domain] = (), gpu: int | None = None) -> None:
        self._domains, self._gpu = tuple(domains), gpu

    def read(self) -> tuple[int, ...]:
        """Return the counters, for `joules`."""
        if self._gpu is not None:
            return (_gpu_millijoules(self._gpu),)
        return tuple(int(one.path.read_text(encoding="ascii")) for one in self._domains)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Return what was used between two readings; a counter that began again in between has done so once."""
        if self._gpu is not None:
            return (after[0] - before[0]) / 1e3
        used = (
            end - start + (one.wraps_at if end < start else 0)
            for one, start, end in zip(self._domains, before, after, strict=True)
        )
        return sum(used) / 1e6


def open_meter(device: str, folder: Path = _FOLDER) -> EnergyMeter:
    """Return the meter of a device: RAPL for the CPU, NVML for a CUDA device.

    Raises
    ------
    UnsupportedOperationError
        There is no such counter, or it cannot be read; the reason is named.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda":
        _gpu_millijoules(int(index or 0))
        return EnergyMeter(gpu=int(index or 0))
    if kind != "cpu":
        raise UnsupportedOperationError(f"energy of {device} cannot be measured: it has no counter. {_FIX}")
    domains = []
    try:
        for path in sorted(one for one in folder.glob("intel-rapl:*") if _PACKAGE.fullmatch(one.name)):
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


def _gpu_millijoules(index: int) -> int:
    """Ask NVML, which needs no CUDA context."""
    try:
        nvml = ctypes.CDLL(_NVML)
        if nvml.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")
    except (OSError, AttributeError) as error:
        msg = f"energy of cuda:{index} cannot be measured: {_NVML} cannot be used. {_FIX}"
        raise UnsupportedOperationError(msg) from error
    try:
        device, used = ctypes.c_void_p(), ctypes.c_ulonglong()
        found = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if found != 0 or nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used)) != 0:
            msg = f"energy of cuda:{index} cannot be measured: the device has no counter that NVML reads. {_FIX}"
            raise UnsupportedOperationError(msg)
        return used.value
    finally:
        nvml.nvmlShutdown()
