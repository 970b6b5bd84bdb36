# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory pools, and who holds what.

::

    pool = MemoryPool("cuda:0", limit=8 << 30, name="embeddings")
    buffer = pool.allocate(1 << 20, stream)   # freed when the last reference goes
    print(pool.stats().current, memory_report())

`MemoryPool`, `Buffer` and `MemoryStats` are classes of the core itself: nothing stands between a call and the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xpuruntime._core import Buffer, MemoryManager, MemoryPool, MemoryStats
from xpuruntime.notebook import one_line
from xpuruntime.printable import bytes_text, printable
from xpuruntime.runtime.device import DeviceLike

__all__ = ["Buffer", "MemoryPool", "MemoryReport", "MemoryStats", "PoolReport", "memory_report"]

_COLUMNS = ("pool", "kind", "device", "in use", "cached", "peak", "limit", "buffers")


@dataclass(frozen=True)
class PoolReport:
    """One pool at one moment."""

    name: str
    kind: str
    device: str
    limit: int | None
    stats: MemoryStats

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        own = {"name": self.name, "kind": self.kind, "device": self.device, "limit": self.limit}
        return own | {"stats": self.stats.to_dict()}


@dataclass(frozen=True)
class MemoryReport:
    """Every live pool, those that hold most first. ``str(report)`` is a table."""

    pools: tuple[PoolReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"pools": [pool.to_dict() for pool in self.pools]}

    def __str__(self) -> str:
        if not self.pools:
            return "no memory pool is live"
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return printable("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines, fragment_table

        if not self.pools:
            return fragment((fragment_lines([str(self)]),))
        return fragment((fragment_table("memory pools", _COLUMNS, self._rows()),))

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for pool in self.pools:
            stats = pool.stats
            limit = "none" if pool.limit is None else bytes_text(pool.limit)
            sizes = (
                bytes_text(stats.current),
                bytes_text(stats.cached),
                bytes_text(stats.peak),
                limit,
                str(stats.allocations),
            )
            rows.append((pool.name, pool.kind, pool.device, *sizes))
        return rows


def memory_report(device: DeviceLike | None = None) -> MemoryReport:
    """Return who holds what: every live pool of one device, or of all.

    Parameters
    ----------
    device : str, int or Device, optional
        Report only the pools that serve this device.
    """
    pools = [
        PoolReport(pool.name, pool.kind, pool.device, pool.limit, pool.stats())
        for pool in MemoryManager.instance().pools(device)
    ]
    return MemoryReport(tuple(sorted(pools, key=lambda pool: pool.stats.reserved, reverse=True)))
