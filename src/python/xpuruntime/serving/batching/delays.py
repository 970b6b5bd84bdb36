# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How long a batch may wait: for others, and behind one that is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from xpuruntime.serving.batching.scheduler import Dispatch

__all__ = ["AdaptiveDelay", "SerialDevice"]

#: What is left of the earlier gaps after one more, or after a delay without one.
_KEPT = 7 / 8
#: Arrivals that are assumed at first: so many delays pass without one before the first is cut short.
_ASSUMED = 4.0
#: One of so many delays is waited for although nobody is expected.
_PROBE = 128


class _Gaps:
    """Arrivals, and the seconds in which they came."""

    __slots__ = ("arrivals", "seconds")

    def __init__(self) -> None:
        self.arrivals, self.seconds = _ASSUMED, 0.0


class AdaptiveDelay:
    """Mean gaps between requests of one queue, by the rows that wait."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._gaps: dict[int, _Gaps] = {}
        #: When an instance last became idle.
        self._idle_since = 0.0
        #: Batches that were sent early and run, by group: who comes meanwhile would have been waited for.
        self._early: dict[Hashable, Dispatch] = {}
        self._probing: set[Hashable] = set()
        self._cut = 0

    def until(self, group: Hashable, rows: int, latest: float) -> float | None:
        """Return up to when a group is worth waiting for, with its rows and its latest arrival; `None`: for the delay.

        It is as long as the mean gap, with the present one in it, is no longer than the delay.
        """
        if group in self._probing:
            return None
        gaps = self._gaps_at(rows)
        return self._begin(latest) + max(0.0, gaps.arrivals * self._delay - gaps.seconds)

    def probes(self, group: Hashable) -> bool:
        """Return whether a group is waited for although nobody is expected, so that a change of the load is found."""
        self._cut = (self._cut + 1) % _PROBE
        if self._cut == 0:
            self._probing.add(group)
        return self._cut == 0

    def arrived(self, group: Hashable, at: float, rows: int, latest: float) -> None:
        """Take a request that came to so many waiting rows of its group; 0 where all instances are busy."""
        early = self._early.pop(group, None)
        if early is not None:
            self._end_early(early, at, came=at - early.at < self._delay)
        elif rows:
            self._add(rows, at - self._begin(latest), came=True)
            if group in self._probing:
                self._cut = _PROBE - 1  # it was not in vain: the next one probes as well

    def sent(self, group: Hashable, batch: Dispatch, rows: int, latest: float) -> None:
        """Take a batch of a group that had so many rows before."""
        self._probing.discard(group)
        if batch.reason == "adaptive":
            self._early[group] = batch
        if batch.reason != "full":
            self._add(rows, batch.at - self._begin(latest), came=False)

    def ended(self, batch: Dispatch, at: float, *, idle: bool) -> None:
        """Take the end of a batch; `idle`: whether an instance was idle before."""
        if not idle:
            self._idle_since = at
        group = batch.parts[0].entry.group
        if self._early.get(group) is batch:
            self._end_early(self._early.pop(group), at, came=False)

    def _begin(self, latest: float) -> float:
        return max(latest, self._idle_since)

    def _end_early(self, batch: Dispatch, at: float, *, came: bool) -> None:
        self._add(batch.rows, at - batch.at, came=came)

    def _add(self, rows: int, seconds: float, *, came: bool) -> None:
        seconds = min(max(0.0, seconds), self._delay)
        gaps = self._gaps_at(rows)
        kept = _KEPT if came else _KEPT ** (seconds / self._delay)
        gaps.arrivals = kept * gaps.arrivals + came
        gaps.seconds = kept * gaps.seconds + seconds

    def _gaps_at(self, rows: int) -> _Gaps:
        gaps = self._gaps.get(rows)
        if gaps is None:
            gaps = self._gaps[rows] = _Gaps()
        return gaps


#: Weight of the latest batch in the expected times of one.
_LATEST = 0.2
#: Share of a batch's time that the next one is sent before its expected end, beside what preparing takes.
_AHEAD = 0.25


class SerialDevice:
    """Expected end of the batches that were sent to a device, from the times of earlier ones."""

    def __init__(self) -> None:
        self._running: dict[Dispatch, None] = {}
        self._last_end = 0.0
        self._compute: float | None = None
        self._preparation = 0.0

    def began(self, batch: Dispatch) -> None:
        """Take a batch that was sent."""
        self._running[batch] = None

    def ended(self, batch: Dispatch, now: float, preparation: float) -> None:
        """Take the end of a batch, and the seconds until its inputs were ready."""
        self._running.pop(batch, None)
        seconds = now - max(batch.at, self._last_end)
        self._last_end = now
        first = self._compute is None
        self._compute = seconds if self._compute is None else self._compute + _LATEST * (seconds - self._compute)
        self._preparation += (1.0 if first else _LATEST) * (preparation - self._preparation)

    def hold_until(self) -> float | None:
        """Return up to when another batch would only wait; `None`: nothing runs, or no batch has been timed yet."""
        if not self._running or self._compute is None:
            return None
        begin = max(next(iter(self._running)).at, self._last_end)
        end = begin + len(self._running) * self._compute
        return end - _AHEAD * self._compute - self._preparation
