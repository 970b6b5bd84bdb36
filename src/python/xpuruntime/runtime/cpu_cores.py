# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`cpu_cores` and `cpu_quota`: cores, hardware threads and share of them that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["CpuCores", "cpu_cores", "cpu_quota"]

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
    return min((found for found in map(_quota_of, folders) if found is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        amount, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if amount == "max" else int(amount) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        amount, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        return int(amount) / int(period) if int(amount) > 0 else None
    return None
