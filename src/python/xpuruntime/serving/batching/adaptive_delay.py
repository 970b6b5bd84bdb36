# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`AdaptiveDelay`: whether another request is expected within the queue delay, by the gaps between earlier ones.

A gap begins with a request that waits while an instance is idle, or with a batch that was sent early, and ends with
the next request of the group. Where none comes before the batch is sent, or ends, the gap is censored: its time counts,
and no arrival. Time over arrivals is the mean gap, as of a Poisson process, with exponential forgetting. It is kept for
each number of rows that wait, since a client that waits for its answer sends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from xpuruntime.serving.batching.entries import Dispatch

__all__ = ["AdaptiveDelay"]

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
    """Mean gaps between requests of one queue, by the rows that wait.

    Parameters
    ----------
    delay : float
        Seconds that a request may wait at most.
    """

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
