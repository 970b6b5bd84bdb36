# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EnergyMeter`: joules that a processor or a GPU has used, where a counter of the machine can be read.

Counters are of whole packages and boards: what other processes use meanwhile is in them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.files.paths import reason_of
from xpuruntime.measuring.nvml import Nvml, NvmlError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EnergyMeter", "open_meter"]

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


def open_meter(device: str, folder: Path = _FOLDER, *, pci_id: str | None = None) -> EnergyMeter:
    """Return the meter of a device: RAPL for the CPU, NVML's counter of total energy for a CUDA device."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return _gpu_meter(device, int(index or 0), pci_id)
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


def _gpu_meter(device: str, index: int, pci_id: str | None) -> EnergyMeter:
    """Return NVML's counter of a GPU, found by its PCI address."""
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

    return next((one.pci_id for one in machine_snapshot().cuda if one.index == index), None)
