# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`AllocatorStats`: what PyTorch uses of xpuruntime's pools, at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpuruntime._core import MemoryPool, TorchAllocatorStats

__all__ = ["AllocatorStats", "PoolUse"]


@dataclass(frozen=True)
class PoolUse:
    """What PyTorch holds of one pool. Sizes are bytes.

    Attributes
    ----------
    pool, kind, device : str
        Name and kind of the pool, and its device.
    limit : int or None
        Most that the pool may hold.
    scopes : int
        Open scopes that use it; 1 where it is PyTorch's allocator of the process.
    current, peak : int
        What PyTorch asked for and has not given back, and the largest that was. With ``scope="block"`` these are its
        segments, in use by tensors or kept for the next ones; with ``scope="process"`` the tensors themselves.
    in_graphs : int
        What PyTorch gave back and a CUDA graph that captured it may still write.
    allocations, total_allocations : int
        Live, and ever.
    failures : int
        Allocations that were refused.
    last_failure : str or None
        Why the last of them was.
    pool_current, pool_reserved : int
        What the pool has given to everybody, and what it holds from the device.
    """

    pool: str
    kind: str
    device: str
    limit: int | None
    scopes: int
    current: int
    peak: int
    in_graphs: int
    allocations: int
    total_allocations: int
    failures: int
    last_failure: str | None
    pool_current: int
    pool_reserved: int

    @classmethod
    def of(cls, pool: MemoryPool, stats: TorchAllocatorStats, scopes: int, last_failure: str | None) -> PoolUse:
        """Return the numbers of one pool now."""
        whole = pool.stats()
        return cls(
            pool=pool.name,
            kind=pool.kind,
            device=pool.device,
            limit=pool.limit,
            scopes=scopes,
            current=stats.current,
            peak=stats.peak,
            in_graphs=stats.in_graphs,
            allocations=stats.allocations,
            total_allocations=stats.total_allocations,
            failures=stats.failures,
            last_failure=last_failure,
            pool_current=whole.current,
            pool_reserved=whole.reserved,
        )


@dataclass(frozen=True)
class AllocatorStats:
    """What PyTorch holds of xpuruntime pools.

    Attributes
    ----------
    scope : {"none", "block", "process"}
        What is active, or still held by tensors.
    uses : tuple of PoolUse
    """

    scope: str
    uses: tuple[PoolUse, ...]

    @property
    def current(self) -> int:
        """Bytes over all pools."""
        return sum(use.current for use in self.uses)

    @property
    def allocations(self) -> int:
        """Live allocations over all pools."""
        return sum(use.allocations for use in self.uses)

    @property
    def failures(self) -> int:
        """Refused allocations over all pools."""
        return sum(use.failures for use in self.uses)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"scope": self.scope, "uses": [asdict(use) for use in self.uses]}
