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
    """What PyTorch holds of one pool. Sizes are bytes."""

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
    """What PyTorch holds of xpuruntime pools."""

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
