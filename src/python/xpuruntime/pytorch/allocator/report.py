# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`memory_report`: a table of who has a device's memory, across PyTorch, xpuruntime's pools and sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime._core import DeviceManager, Dispatcher, MemoryManager
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.notebook import one_line
from xpuruntime.printable import bytes_text, printable
from xpuruntime.pytorch.allocator.api import allocator_stats
from xpuruntime.pytorch.allocator.torch_pools import all_bridges
from xpuruntime.runtime.session_registry import open_sessions

if TYPE_CHECKING:
    from xpuruntime.pytorch.allocator.api import AllocatorStats
    from xpuruntime.runtime.session_registry import HoldsMemory

_COLUMNS = ("device", "holder", "kind", "held", "in use")
_NO_CONTEXT = "and asking would create a CUDA context there"


@dataclass(frozen=True)
class MemoryPart:
    """Some of what a holder holds, in bytes; parts may leave a rest, and do not add to the holder."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Holder:
    """Who has memory from a device."""

    owner: str
    kind: str
    held: int
    in_use: int
    parts: tuple[MemoryPart, ...] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """One device, or the host."""

    device: str
    total: int | None
    free: int | None
    holders: tuple[Holder, ...]
    unexplained: int | None


@dataclass(frozen=True)
class OpenSessionMemory:
    """An open session, and what it says it holds. That lies in holders of its device, as far as they are known."""

    session: str
    device: str | None
    memory: dict[str, int]


@dataclass(frozen=True)
class DeviceMemoryReport:
    """Who holds what, at one moment. ``str(report)`` is a table.

    Attributes
    ----------
    devices : tuple of DeviceMemory
    sessions : tuple of OpenSessionMemory
    workspaces : int
        Bytes of scratch memory of xpuruntime kernels; they lie in xpuruntime pools.
    allocator : AllocatorStats
        What PyTorch holds of xpuruntime pools.
    absent : tuple of str
        What the report would have had, and why it has not.
    """

    devices: tuple[DeviceMemory, ...]
    sessions: tuple[OpenSessionMemory, ...]
    workspaces: int
    allocator: AllocatorStats
    absent: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "devices": [asdict(part) for part in self.devices],
            "sessions": [asdict(part) for part in self.sessions],
            "workspaces": self.workspaces,
            "allocator": self.allocator.to_dict(),
            "absent": list(self.absent),
        }

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return printable("\n".join([*lines, *self._remarks()]))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines, fragment_table

        return fragment((fragment_table("memory", _COLUMNS, self._rows()), fragment_lines(self._remarks())))

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for device in self.devices:
            for holder in device.holders:
                rows.append(
                    (device.device, holder.owner, holder.kind, bytes_text(holder.held), bytes_text(holder.in_use))
                )
                rows += [
                    (device.device, f"  of that: {part.what}", "", "", bytes_text(part.bytes)) for part in holder.parts
                ]
            if device.unexplained is not None:
                rows.append((device.device, "unexplained", "", bytes_text(device.unexplained), ""))
            if device.total is not None and device.free is not None:
                rows.append((device.device, "free", f"of {bytes_text(device.total)}", bytes_text(device.free), ""))
        return rows

    def _remarks(self) -> list[str]:
        lines = []
        for session in self.sessions:
            held = ", ".join(f"{owner} {bytes_text(size)}" for owner, size in session.memory.items())
            lines.append(f"session {session.session}: {held or 'its engine does not report it'}")
        lines.append(f"workspaces of xpuruntime kernels, within the pools: {bytes_text(self.workspaces)}")
        return lines + [f"absent: {reason}" for reason in self.absent]


def memory_report(device: object = None, *, sessions: Iterable[HoldsMemory] | None = None) -> DeviceMemoryReport:
    """Report who holds memory: PyTorch, xpuruntime pools, sessions and kernels, and what nobody here can explain.

    Reads numbers only: nothing is allocated or given back, and no CUDA context is created, so that a CUDA device which
    this process has not used is listed as absent.

    Parameters
    ----------
    device : torch.device, str or int, optional
        Report only this device. Default: the host, and every CUDA device in use.
    sessions : iterable of InferenceSession, optional
        Default: all that are open in this process.

    Returns
    -------
    DeviceMemoryReport

    Raises
    ------
    InputError
        The device is missing, or a session is none.
    """
    if sessions is not None and not isinstance(sessions, Iterable):
        raise InputError(f"sessions is of type {type(sessions).__name__}: give a list of InferenceSession objects")
    absent: list[str] = []
    stats = allocator_stats()
    pools = _pools()
    wanted = _devices(device, pools, absent)
    devices = tuple(_device_memory(name, pools.get(name, []), stats, absent) for name in wanted)
    listed = _sessions(open_sessions() if sessions is None else sessions, stated=sessions is not None)
    if device is not None:
        listed = [session for session in listed if session.device in (None, *wanted)]
    return DeviceMemoryReport(devices, tuple(listed), Dispatcher.instance().workspace_bytes(), stats, tuple(absent))


def _pools() -> dict[str, list[Any]]:
    """Return xpuruntime pools by where their memory is: that of a pinned pool is on the host."""
    pools: dict[str, list[Any]] = {}
    for pool in MemoryManager.instance().pools():
        pools.setdefault("cpu" if pool.kind == "pinned" else pool.device, []).append(pool)
    return pools


def _devices(device: object, pools: dict[str, list[Any]], absent: list[str]) -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen_by_core = DeviceManager.instance().get_device_count("cuda")
    if device is not None:
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        if name == "cuda":
            name = f"cuda:{torch.cuda.current_device()}" if count else "cuda:0"
        known = ["cpu", *(f"cuda:{index}" for index in range(max(count, seen_by_core)))]
        if name not in known:
            msg = f"device {name!r} was not found: this process sees {', '.join(known)}"
            raise InputError(msg, device=name)
        return [name]
    if count == 0:
        why = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        absent.append(f"CUDA tensors: torch {torch.__version__} {why}")
    if seen_by_core == 0:
        absent.append(f"CUDA devices: {DeviceManager.instance().cuda_reason()}")
    names = ["cpu"]
    for index in range(max(count, seen_by_core)):
        name = f"cuda:{index}"
        if name in pools or _torch_uses(index):
            names.append(name)
        else:
            absent.append(f"{name}: this process has not used it, {_NO_CONTEXT}")
    return names


def _torch_uses(index: int) -> bool:
    if not torch.cuda.is_initialized():
        return False
    if index == torch.cuda.current_device():
        return True
    return torch.cuda.memory.get_allocator_backend() != "pluggable" and int(torch.cuda.memory_reserved(index)) > 0


def _device_memory(name: str, pools: list[Any], stats: AllocatorStats, absent: list[str]) -> DeviceMemory:
    # In the process's allocator's place, xpuruntime pools hold all that PyTorch has.
    holders = [] if name == "cpu" or stats.scope == "process" else _torch_holder(name, absent)
    for pool in pools:
        now = pool.stats()
        size = sum(use.current for use in stats.uses if (use.pool, use.device) == (pool.name, name))
        parts = (MemoryPart("PyTorch, by set_allocator", size),) if size else ()
        holders.append(Holder(pool.name, pool.kind, now.reserved, now.current, parts))
    holders.sort(key=lambda holder: holder.held, reverse=True)
    if name != "cpu" and not pools and not _torch_uses(_index(name)):
        absent.append(f"free and total memory of {name}: this process has not used it, {_NO_CONTEXT}")
        return DeviceMemory(name, None, None, tuple(holders), None)
    free, total = DeviceManager.instance().memory_info(name)
    rest = None if name == "cpu" else total - free - sum(holder.held for holder in holders)
    return DeviceMemory(name, total, free, tuple(holders), rest)


def _torch_holder(name: str, absent: list[str]) -> list[Holder]:
    """Return PyTorch's own part: what its allocator holds without what it got from xpuruntime."""
    if not torch.cuda.is_initialized():
        absent.append(f"PyTorch on {name}: it has not begun to use CUDA")
        return []
    backend = torch.cuda.memory.get_allocator_backend()
    if backend == "pluggable":
        absent.append(f"PyTorch's own numbers on {name}: an allocator of another library serves it and reports none")
        return []
    reserved, allocated = torch.cuda.memory_reserved(name), torch.cuda.memory_allocated(name)
    if backend != "native":
        absent.append(f"PyTorch's pools on {name}: allocator backend {backend!r} does not list them")
        return [Holder("PyTorch", backend, reserved, allocated)]
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == _index(name)]
    from_us = {identity for bridge in all_bridges() for identity in bridge.pool_ids}
    bridged = [segment for segment in segments if tuple(segment["segment_pool_id"]) in from_us]
    private = sum(
        segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) not in {(0, 0), *from_us}
    )
    held = reserved - sum(segment["total_size"] for segment in bridged)
    in_use = allocated - sum(segment["allocated_size"] for segment in bridged)
    parts = (MemoryPart("pools of CUDA graphs and of users", private),) if private else ()
    return [Holder("PyTorch", "caching allocator", held, in_use, parts)]


def _index(name: str) -> int:
    return int(name.rpartition(":")[2])


def _sessions(holders: Iterable[HoldsMemory], *, stated: bool) -> list[OpenSessionMemory]:
    listed = []
    for holder in holders:
        memory = getattr(holder, "memory", None)
        if not callable(memory):
            msg = f"{holder!r} among sessions has no memory(): give InferenceSession objects"
            raise InputError(msg)
        try:
            held = {str(owner): int(size) for owner, size in memory().items()}
        except XpuRuntimeError:
            if stated:
                raise
            continue  # closed since it was noted
        listed.append(OpenSessionMemory(repr(holder), getattr(getattr(holder, "plan", None), "device", None), held))
    return listed
