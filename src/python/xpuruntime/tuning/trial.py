# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trials of a search: candidates, what came of opening them, and the devices that they are measured on."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.policies.device_spec import DeviceSpec
from xpuruntime.policies.document import Refused, quote
from xpuruntime.runtime.cpu_and_memory import CpuCores, cpu_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.runtime.machine import Machine

__all__ = [
    "CONTROL",
    "DEVICE_NAMES",
    "USED_UP",
    "Candidate",
    "CandidateFailed",
    "DeviceLost",
    "OutOfTime",
    "Trial",
    "TrialDevice",
    "check_devices",
    "check_trial_device",
    "hardware_difference",
    "policy_device",
    "trial_devices",
]

#: The id of the user's own policy.
CONTROL = "c0"
#: Why something was not measured, or not to its end.
USED_UP = "the budget of time was used up"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is tried."""

    id: str
    engine: str
    device: str
    changes: dict[str, Any]
    policy: dict[str, Any]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came of opening a candidate and comparing its outputs."""

    code: CandidateCode | None = None
    reason: str = ""
    start: float | None = None
    memory: int | None = None
    error: float | None = None
    cosine: float | None = None
    run: float | None = None
    graph: str | None = None
    seconds: float = 0.0


class CandidateFailed(XpuRuntimeError):  # noqa: N818  read as a sentence
    """A candidate failed while it was measured. Private to this package: it becomes the candidate's code and reason."""

    def __init__(self, code: CandidateCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = CandidateCode(code), reason


class DeviceLost(XpuRuntimeError):  # noqa: N818  read as a sentence
    """The device that candidates were measured on went away: no fault of theirs."""


class OutOfTime(XpuRuntimeError):  # noqa: N818  read as a sentence
    """The budget ended while something was measured. It is no fault of the candidate's, and no line of the journal."""

    def __init__(self) -> None:
        super().__init__(USED_UP)


#: What names a device in a specification.
DEVICE_NAMES = "a device such as 'cuda:1', or a set of cores such as 'cpu:0-3' or 'cpu:0-3+8-11'"
_SET = "cpu:"
_RANGE = re.compile(r"(0|[1-9][0-9]{0,4})(?:-(0|[1-9][0-9]{0,4}))?")


class TrialDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that candidates are measured on, one at a time."""

    name: str
    device: str
    cores: tuple[int, ...] = ()
    hardware: dict[str, Any] = {}


def check_trial_device(text: str) -> str:
    """Return the name of a device in its canonical form. Raises `Refused`."""
    if text.startswith(_SET):
        return f"{_SET}{_cores_text(_cores(text))}"
    spec = DeviceSpec._parse(text)
    if spec.kind == "auto":
        raise Refused(f"'auto' is not a device. Fix: name {DEVICE_NAMES}")
    return f"{spec.kind}:0" if spec.index is None and spec.kind in ("cuda", "rocm") else str(spec)


def check_devices(names: Sequence[str]) -> None:
    """Check devices against each other. Raises `Refused`."""
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise Refused(f"{' and '.join(sorted(kinds))} are unlike devices, and a search ranks what it measures on all")
    if "cpu" in names and len(names) > 1:
        raise Refused("'cpu' is all cores, and shares them with the others. Fix: name disjoint sets, such as 'cpu:0-3'")
    owners: dict[int, str] = {}
    for name in names:
        for core in _cores(name) if name.startswith(_SET) else ():
            if core in owners:
                raise Refused(f"{owners[core]} and {name} share core {core}; a device has one candidate at a time")
            owners[core] = name


def trial_devices(names: Sequence[str], planned: str, machine: Machine) -> tuple[TrialDevice, ...]:
    """Return the devices of a search."""
    devices = tuple(_device(name, machine) for name in names or [planned])
    kind = planned.partition(":")[0]
    first = _device(planned, machine) if kind != "cpu" else devices[0]
    for device in devices:
        if device.device.partition(":")[0] != kind:
            raise UnsupportedOperationError(
                f"devices: {device.name} is asked for, and the policy runs on {planned}. Fix: state execution.device: "
                f"{device.device} in the policy, or leave devices out"
            )
        if difference := hardware_difference(first.hardware, device.hardware):
            raise UnsupportedOperationError(
                f"devices: {device.name} is unlike {first.name} ({difference}), and gains on the two cannot be ranked. "
                "Fix: leave one of them out"
            )
    return devices


def policy_device(name: str) -> str:
    """Return a device as a policy has it: ``"cpu"`` for a set of cores."""
    return "cpu" if name.startswith(_SET) else name


def hardware_difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Say how the hardware of two devices differs; ``""`` where it does not."""
    differs = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return "; ".join(f"{name}: {first.get(name)} and {other.get(name)}" for name in differs)


def _device(name: str, machine: Machine) -> TrialDevice:
    kind, _, index = name.partition(":")
    if kind == "cpu":
        cores = _cores(name) if index else ()
        return TrialDevice(name=name, device="cpu", cores=cores, hardware=_processor(name, cores, machine))
    if kind != "cuda":
        return TrialDevice(name=name, device=name)
    gpu = next((device for device in machine.cuda if device.index == int(index or 0)), None)
    if gpu is None:
        there = ", ".join(f"cuda:{device.index}" for device in machine.cuda) or machine.cuda_reason or "none"
        raise UnsupportedOperationError(f"devices: {name} was not found; CUDA devices: {there}. Fix: leave it out")
    hardware = {"name": gpu.name, "memory": gpu.total_memory, "multiprocessors": gpu.sm_count}
    return TrialDevice(name=name, device=f"cuda:{gpu.index}", hardware=hardware)


def _processor(name: str, cores: tuple[int, ...], machine: Machine) -> dict[str, Any]:
    """Return what a set of cores is of. Raises where this process may not use them."""
    if cores:
        try:
            allowed = os.sched_getaffinity(0)
        except AttributeError:
            raise UnsupportedOperationError(
                f"devices: {name} is a set of cores, which needs Linux. Fix: leave devices out"
            ) from None
        if missing := sorted(set(cores) - allowed):
            raise UnsupportedOperationError(
                f"devices: {name} has core {missing[0]}, and this process may use {_cores_text(sorted(allowed))}. Fix: "
                "name cores of these"
            )
    count: CpuCores = cpu_cores(cores or None)
    clocks = {_clock(core) for core in cores} - {None}
    facts = {"name": machine.cpu.name, "cores": count.physical, "threads": count.logical}
    return {**facts, "khz": sorted(clocks)} if clocks else facts


def _clock(core: int) -> int | None:
    """Return the highest clock of a core, where the system reports it: cores of one processor may be unlike."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq").read_text(encoding="ascii"))
    return None


def _cores(name: str) -> tuple[int, ...]:
    """Return the cores of a set."""
    cores: list[int] = []
    for part in name.removeprefix(_SET).split("+"):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if first > last:
            raise Refused(f"{quote(name)} is not a set of cores. Fix: write {_SET}0-3, or {_SET}0-3+8-11")
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise Refused(f"{quote(name)} has a core twice")
    return tuple(sorted(cores))


def _cores_text(cores: Sequence[int]) -> str:
    """Return cores in short: ``"0-3+8"``."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return "+".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
