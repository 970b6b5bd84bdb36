# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Execution facts: the device, driver and libraries that a plan was made for, without what differs between equals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from xpuruntime.engines.base import Engine
    from xpuruntime.runtime.machine import Library, Machine

__all__ = ["DeviceIdentity", "ExecutionFacts", "LibraryIdentity", "execution_facts"]


class LibraryIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library as a build: equal wherever the same file is installed. See `Library` for the fields."""

    name: str
    version: str | None = None
    build_id: str | None = None
    size: int | None = None


class DeviceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A device as a model: equal for two devices that compute alike, so without index, address or memory."""

    kind: str
    name: str | None = None
    architecture: str | None = None
    features: tuple[str, ...] = ()
    units: int | None = None


class ExecutionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is executed on and by."""

    device: DeviceIdentity
    driver: str | None = None
    libraries: tuple[LibraryIdentity, ...] = ()
    xpuruntime: str = ""


def execution_facts(engine: Engine, device: str, machine: Machine) -> ExecutionFacts:
    """Return the facts of an engine on one device of a machine. Pure."""
    from xpuruntime import __version__

    facts = machine.engines.get(engine.name)
    kind, _, index = device.partition(":")
    driver: str | None = None
    gpu = next((one for one in machine.cuda if kind == "cuda" and one.index == int(index or 0)), None)
    if gpu is not None:
        driver = "{}.{}".format(*gpu.driver_version)
        architecture = "sm{}{}".format(*gpu.compute_capability)
        identity = DeviceIdentity(kind=kind, name=gpu.name, architecture=architecture, units=gpu.sm_count)
    elif kind == "cpu":
        cpu = machine.cpu
        identity = DeviceIdentity(
            kind=kind, name=cpu.name, architecture=machine.architecture, features=cpu.features, units=cpu.cores
        )
    else:
        identity = DeviceIdentity(kind=kind, name=engine.device_name(device, machine))
    libraries: list[Library] = []
    if facts is not None:
        libraries += (*facts.libraries, *(facts.cuda_libraries if kind == "cuda" else ()))
    if machine.core is not None:
        libraries.append(machine.core)
    return ExecutionFacts(
        device=identity,
        driver=driver,
        libraries=tuple(
            LibraryIdentity(name=one.name, version=one.version, build_id=one.build_id, size=one.size)
            for one in libraries
        ),
        xpuruntime=__version__,
    )
