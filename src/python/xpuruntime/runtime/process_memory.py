# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`process_memory`: what the operating system counts as this process's memory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ProcessMemory", "process_memory", "read_status"]

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


def _bytes(value: str | None) -> int | None:
    words = (value or "").split()
    return int(words[0]) * 1024 if len(words) == 2 and words[0].isdigit() and words[1] == "kB" else None
