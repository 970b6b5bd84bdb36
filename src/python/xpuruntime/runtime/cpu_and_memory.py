# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Processor and memory: cores, share of them and caches, and the memory that a process has and may take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path("/sys/devices/system/cpu")


class CpuCores(NamedTuple):
    """Cores, and hardware threads of them; equal where the system does not tell which threads share a core."""

    physical: int
    logical: int


def cpu_cores(allowed: Collection[int] | None = None, folder: Path = _FOLDER) -> CpuCores:
    """Return how many cores a set of processors has, by default the one that the affinity of this process allows."""
    try:
        allowed = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
        return CpuCores(count, count)
    siblings = set()
    for number in allowed:
        text = str(number)
        with contextlib.suppress(OSError):
            text = (folder / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
        siblings.add(text)
    return CpuCores(max(1, len(siblings)), max(1, len(allowed)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the processors' time that the control groups of this process allow, in processors; ``None``: no limit."""
    folders = [root, root / "cpu"]
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                base = root if not controllers else root / "cpu"
                parts = [part for part in path.split("/") if part]
                folders += [base.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
    return min((quota for quota in map(_quota_of, folders) if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        amount, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if amount == "max" else int(amount) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        amount, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        return int(amount) / int(period) if int(amount) > 0 else None
    return None


#: Where the system does not say: more than most processors have.
_UNKNOWN = 4 * 2**20


def second_level_bytes() -> int:
    """Return the size of the second-level cache of one core; where the system does not say it, 4 MiB."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        size = 0
    return size if size > 0 else _UNKNOWN


_STATUS = Path("/proc/self/status")


class ProcessMemory:
    """Bytes in main memory, now and at most since the process began; ``None`` where the system does not say."""

    __slots__ = ("most_resident", "resident")

    def __init__(self, resident: int | None, most_resident: int | None) -> None:
        self.resident = resident
        self.most_resident = most_resident


def process_memory() -> ProcessMemory:
    """Read ``/proc/self/status``, which Linux has; elsewhere nothing is known."""
    try:
        return read_status(_STATUS.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return ProcessMemory(None, None)


def read_status(text: str) -> ProcessMemory:
    """Return what the lines ``VmRSS`` and ``VmHWM`` say. Pure."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return ProcessMemory(_bytes(lines.get("VmRSS")), _bytes(lines.get("VmHWM")))


def available_memory(
    share: float = 1.0,
    *,
    meminfo: Path = Path("/proc/meminfo"),
    groups: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
) -> int | None:
    """Return a share of the bytes that new processes may take: of the system, and of this process's control groups.

    ``None`` where neither says anything.
    """
    numbers: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
        numbers = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = root / controllers
            inside = Path(path.lstrip("/"))
            for folder in (top / inside, *(top / parent for parent in inside.parents)):  # each of them limits
                numbers += _left(folder, "memory.max", "memory.current")
                numbers += _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return int(max(0, min(numbers)) * share) if numbers else None


def _left(folder: Path, limit: str, used: str) -> list[int]:
    try:
        most, taken = (int((folder / name).read_text()) for name in (limit, used))
        lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
        counts = {name: int(value) for name, value in lines}
    except (OSError, ValueError):  # of the other version, or "max"
        return []
    # Files that were read are counted, and given up where memory is needed.
    return [most - taken + counts.get("total_inactive_file", counts.get("inactive_file", 0))]


def _bytes(value: str | None) -> int | None:
    words = (value or "").split()
    return int(words[0]) * 1024 if len(words) == 2 and words[0].isdigit() and words[1] == "kB" else None
