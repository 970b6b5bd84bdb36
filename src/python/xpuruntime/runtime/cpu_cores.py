# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`cpu_cores`: number of cores and hardware threads that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["CpuCores", "cpu_cores"]

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
