# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`MemoryBudget`: how much memory models take by device, and which one goes for another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from xpuruntime.policies.memory_and_artifacts import format_bytes
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from xpuruntime.serving.models.settings import MemorySettings

__all__ = ["Evictable", "MemoryBudget"]


class Evictable(Protocol):
    """What takes memory."""

    name: str
    last_used: float

    def try_evict(self) -> bool:
        """Unload it if nobody uses it; return whether it is unloaded."""
        ...


class MemoryBudget:
    """Memory of all models of a server, by device. Safe to call from many threads.

    Sizes are those that were measured when a model was loaded; before that, of its file.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._held: dict[Evictable, tuple[str, int]] = {}
        #: Models that were evicted so far.
        self.evictions = 0

    @property
    def limits(self) -> dict[str, int]:
        """Most bytes by device."""
        return dict(self._settings.budget)

    @property
    def limited(self) -> bool:
        """Whether a device has a limit."""
        return bool(self._settings.budget)

    def used(self) -> dict[str, int]:
        """Return bytes by device."""
        with self._lock:
            found = dict.fromkeys(self._settings.budget, 0)
            for device, size in self._held.values():
                found[device] = found.get(device, 0) + size
            return found

    def hold(self, model: Evictable, device: str, size: int) -> None:
        """Take memory for a model, and evict others where there is not enough; a model that had some has this now."""
        with self._lock:
            before = self._held.pop(model, None)
            limit = self._settings.budget.get(device)
            while limit is not None and self._used(device) + size > limit:
                if self._permanent(device) + size > limit or not self._evict_one(device):
                    refusal = self._refusal(model, device, size, limit)
                    if before is not None:
                        self._held[model] = before
                    raise refusal
            self._held[model] = (device, size)

    def release(self, model: Evictable) -> None:
        """Give back what a model has."""
        with self._lock:
            self._held.pop(model, None)

    def _used(self, device: str) -> int:
        return sum(size for where, size in self._held.values() if where == device)

    def _may_go(self, model: Evictable) -> bool:
        return self._settings.evict != "none" and model.name not in self._settings.keep

    def _permanent(self, device: str) -> int:
        """Return bytes of the models that are never evicted."""
        return sum(size for one, (where, size) in self._held.items() if where == device and not self._may_go(one))

    def _evict_one(self, device: str) -> bool:
        """Unload the least recently used model that nobody uses; return whether there was one."""
        candidates = [one for one, (where, _) in self._held.items() if where == device and self._may_go(one)]
        for one in sorted(candidates, key=lambda one: one.last_used):
            if one.try_evict():
                self._held.pop(one, None)
                self.evictions += 1
                return True
        return False

    def _refusal(self, model: Evictable, device: str, size: int, limit: int) -> ServingError:
        others = [
            f"{one.name} {_shown(held)}{' (kept)' if one.name in self._settings.keep else ''}"
            for one, (where, held) in self._held.items()
            if where == device
        ]
        return ServingError(
            Status.RESOURCE_EXHAUSTED,
            f"model {model.name!r} takes {_shown(size)} on {device}, whose budget is {format_bytes(limit)}, and "
            f"no other model can go now: {', '.join(others) or 'there is none'}. Fix: raise memory.budget, or serve "
            "fewer models",
            retry_after=1.0,
        )


def _shown(size: int) -> str:
    return f"{size / 2**20:.1f}MiB"
