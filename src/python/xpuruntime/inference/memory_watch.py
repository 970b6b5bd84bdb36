# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`MemoryWatch`: takes a sample of who holds how much memory at each checkpoint of a pass."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xpuruntime.evidence.sections.memory_over_time import MemorySample
from xpuruntime.runtime.cpu_and_memory import process_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MemoryWatch"]


class MemoryWatch:
    """Call it with the name of a checkpoint; `samples` has what was held at each."""

    def __init__(self, held: Callable[[], Mapping[str, int]], device: str) -> None:
        self._held = held
        self._device = device
        self._start = time.perf_counter()
        self._said: dict[str, None] = {}
        self.samples: list[MemorySample] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read, each said once."""
        return tuple(self._said)

    def __call__(self, moment: str) -> None:
        """Take a sample."""
        at = (time.perf_counter() - self._start) * 1e6 if self.samples else 0.0
        owners = {f"session: {owner}": held for owner, held in self._of_session().items()}
        owners |= self._of_pools()
        owners |= self._of_process()
        owners |= self._of_device()
        self.samples.append(MemorySample(moment=moment, at_us=at, owners=owners))

    def _of_session(self) -> Mapping[str, int]:
        try:
            return self._held()
        except Exception as error:  # an engine of someone else's may raise anything
            text = " ".join(str(error).split())[:200]
            self._said[f"the engine does not report what the session holds: {type(error).__name__}: {text}"] = None
            return {}

    def _of_pools(self) -> dict[str, int]:
        from xpuruntime.runtime.memory import memory_report

        found: dict[str, int] = {}
        for pool in memory_report().pools:
            for word, held in (("in use", pool.stats.current), ("cached", pool.stats.cached)):
                owner = f"pool {pool.name}: {word}"
                found[owner] = found.get(owner, 0) + held  # names need not be unique
        return found

    def _of_process(self) -> dict[str, int]:
        now = process_memory()
        if now.resident is None:
            self._said["this system does not report the memory of a process: /proc/self/status is not there"] = None
        told = (("resident", now.resident), ("most resident", now.most_resident))
        return {f"process: {word}": held for word, held in told if held is not None}

    def _of_device(self) -> dict[str, int]:
        if not self._device.startswith("cuda"):
            return {}
        from xpuruntime._core import DeviceManager
        from xpuruntime.errors import XpuRuntimeError

        try:
            free, total = DeviceManager.instance().memory_info(self._device)
        except XpuRuntimeError as error:
            self._said[f"the memory of {self._device} could not be read: {error}"] = None
            return {}
        return {f"{self._device}: used": total - free}
