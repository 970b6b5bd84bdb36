# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`summed`: the kernels, copies and fills of devices in all units of a report, each once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.evidence.kernels.names import short_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.evidence.records import DeviceKernel, Unit

__all__ = ["KernelSum", "reported_kernel", "summed", "tensor_cores_text"]


class KernelSum(NamedTuple):
    """One kernel in all units."""

    name: str
    short: str
    kind: str
    times: float
    us: float
    share: float
    tensor_cores: bool | None
    precision: str | None
    units: tuple[str, ...]


def summed(units: Iterable[Unit]) -> tuple[KernelSum, ...]:
    """Return what devices ran, the longest first; empty where no profiler of devices watched."""
    held: dict[tuple[str, str], list[tuple[DeviceKernel, str]]] = defaultdict(list)
    for unit in units:
        for one in unit.device_kernels:
            held[one.kind, one.name].append((one, unit.id))
    total = sum(one.us for ones in held.values() for one, _ in ones)
    found = []
    for (kind, name), ones in held.items():
        us = sum(one.us for one, _ in ones)
        first = ones[0][0]
        found.append(
            KernelSum(
                name=name,
                short=short_name(name) if kind == "kernel" else name,
                kind=kind,
                times=sum(one.count for one, _ in ones),
                us=us,
                share=us / total if total else 0.0,
                tensor_cores=first.tensor_cores,
                precision=first.precision,
                units=tuple(dict.fromkeys(unit for _, unit in ones)),
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.us, one.name)))


def reported_kernel(unit: Unit) -> str | None:
    """Return which kernel ran: as the engine reports it, else short names of the device's; ``None``: not reported."""
    if unit.kernel is not None:
        return unit.kernel if unit.kernel_source == "reported" else None
    names = dict.fromkeys(short_name(one.name) for one in unit.device_kernels if one.kind == "kernel")
    return ", ".join(names) or None


def tensor_cores_text(tensor_cores: bool | None, precision: str | None) -> str:
    """Return how a kernel multiplies, as its name shows, such as ``"tensor cores, tf32"``; ``"-"``: it does not."""
    if tensor_cores is None:
        return "-"
    return ", ".join(filter(None, ("tensor cores" if tensor_cores else "no tensor cores", precision)))
