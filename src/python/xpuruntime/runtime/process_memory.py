# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`process_memory`: what the operating system counts as this process's memory; `available_memory`: what it may take."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["ProcessMemory", "available_memory", "process_memory", "read_status"]

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
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = root / controllers
            inside = Path(path.lstrip("/"))
            for folder in (top / inside, *(top / one for one in inside.parents)):  # each of them limits
                found += _left(folder, "memory.max", "memory.current")
                found += _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return int(max(0, min(found)) * share) if found else None


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
