# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory over time: what was held at checkpoints of the pass, and what the tensors between units occupy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec


class MemorySample(msgspec.Struct, frozen=True, kw_only=True):
    """Who held how many bytes at one checkpoint of the pass.

    Attributes
    ----------
    moment : str
        Name of the checkpoint: what had just happened, such as ``"instrumented copy loaded"``.
    at_us : float
        Microseconds since the first sample.
    owners : dict of str to int
        Bytes by owner. They overlap, so they are not added up: ``"session: …"`` is what the engine reports of the
        session, ``"pool …: in use"`` and ``"pool …: cached"`` an xpuruntime pool, ``"process: resident"`` and
        ``"process: most resident"`` what the operating system counts for the process, now and since it began, and
        ``"cuda:0: used"`` all that is taken of a device, by any process.
    """

    moment: str
    at_us: float
    owners: dict[str, int]


class LiveBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What the tensors that a model's units make occupy around one unit.

    A tensor counts from the unit that makes it to the last one that reads it, or to the end where it is an output.
    Weights and the inputs of the model are not counted.

    Attributes
    ----------
    unit : str
        The `id` of the unit; units come in the order of execution.
    during : int
        Bytes while it runs: with what it reads, and with what it makes.
    after : int
        Bytes that are still needed after it.
    """

    unit: str
    during: int
    after: int


def most_by_owner(samples: Sequence[MemorySample]) -> dict[str, tuple[int, str]]:
    """Return the most bytes that each owner held in any sample, and the first checkpoint at which it held them."""
    results: dict[str, tuple[int, str]] = {}
    for sample in samples:
        for owner, held in sample.owners.items():
            if owner not in results or held > results[owner][0]:
                results[owner] = (held, sample.moment)
    return results


def most_live(series: Sequence[LiveBytes]) -> LiveBytes | None:
    """Return the unit around which most bytes are live, the first of them; ``None`` where nothing is known."""
    return max(series, key=lambda entry: entry.during, default=None)


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
    points, now = [], 0
    for position, step in enumerate(steps):
        now += sum(step.makes.values())
        during = now
        now -= sum(size[name] for name in ends.get(position, ()))
        points.append(LiveBytes(unit=step.unit, during=during, after=now))
    return tuple(points)
