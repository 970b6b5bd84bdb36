# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`live_bytes`: from the tensors that units make and read, what is live around each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.evidence.sections.memory_over_time import LiveBytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["UnitMemory", "live_bytes"]


class UnitMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One unit, as far as memory goes."""

    unit: str
    reads: tuple[str, ...]
    makes: dict[str, int] = {}
    views: dict[str, str] = {}


def live_bytes(steps: Sequence[UnitMemory], outputs: Collection[str] = ()) -> tuple[LiveBytes, ...]:
    """Return what is live around each step, in the order of the steps."""
    owner: dict[str, str] = {}
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in step.reads:
            if name in owner:
                last[owner[name]] = position
        for name, held in step.makes.items():
            owner[name] = name
            size[name] = held
            last[name] = position
        for name, base in step.views.items():
            if base in owner:
                owner[name] = owner[base]
                last[owner[base]] = position
    for name in outputs:
        if name in owner:
            last[owner[name]] = len(steps)
    ends: dict[int, list[str]] = {}
    for name, position in last.items():
        ends.setdefault(position, []).append(name)
    found, now = [], 0
    for position, step in enumerate(steps):
        now += sum(step.makes.values())
        during = now
        now -= sum(size[name] for name in ends.get(position, ()))
        found.append(LiveBytes(unit=step.unit, during=during, after=now))
    return tuple(found)
