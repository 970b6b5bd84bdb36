# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests as a scheduler sees them: weights with a time of arrival, a deadline and a group, and parts of batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["REASONS", "Dispatch", "Entry", "EntryRows", "Group", "Outcome", "QueueFull", "Reason"]

Outcome = Literal["waiting", "done", "failed", "expired", "cancelled"]
Reason = Literal["full", "preferred", "delay", "adaptive", "busy", "idle", "deadline", "drain", "retry", "inline"]

#: Why a batch was sent: it was full; it had a preferred size; its oldest request had waited for the delay; no other
#: was expected within the delay; the device was busy, and is about to be free; an instance was idle and there is no
#: delay; a deadline would have passed during the delay; the queue is being drained; a request of a failed batch runs
#: alone; a short request ran in the thread that received it.
REASONS: tuple[Reason, ...] = (
    "full", "preferred", "delay", "adaptive", "busy", "idle", "deadline", "drain", "retry", "inline",
)  # fmt: skip


class QueueFull(Exception):  # noqa: N818 - a state
    """The queue has as many requests as it may have, or takes none any more.

    Parameters
    ----------
    retry_after : float
        Seconds after which there is probably room; 0 where the queue is being drained.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"retry after {retry_after:.3f} s")
        self.retry_after = retry_after


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the queue or running.

    Parameters
    ----------
    rows : int
        Its weight: its own batch size.
    group : hashable
        Only entries of one group run together.
    arrived : float
    deadline : float, optional
        Past it the entry is expired, also while it runs.
    overdue : float, optional
        Past it the entry is served after all that are in time.
    level : int
        Lower ones are served first.
    payload : object
        The caller's own.
    """

    rows: int
    group: Hashable
    arrived: float
    deadline: float | None = None
    overdue: float | None = None
    level: int = 0
    payload: Any = None
    #: Kept by the scheduler: place in the order of arrival, rows handed out and rows done.
    number: int = field(default=-1, init=False)
    sent: int = field(default=0, init=False)
    done: int = field(default=0, init=False)
    retried: bool = field(default=False, init=False)
    outcome: Outcome = field(default="waiting", init=False)
    error: BaseException | None = field(default=None, init=False)

    def waits_at(self, level: int) -> bool:
        """Whether rows of it wait at this level."""
        return self.outcome == "waiting" and self.sent < self.rows and self.level == level


class Group:
    """Entries of one group that wait, by level.

    Parameters
    ----------
    levels : int
        How many levels there are, the one of entries past their timeout among them.
    """

    __slots__ = ("lanes", "latest", "rows")

    def __init__(self, levels: int) -> None:
        self.lanes: tuple[deque[Entry], ...] = tuple(deque() for _ in range(levels))
        self.rows = 0
        #: When the latest of them arrived.
        self.latest = 0.0

    def waiting(self) -> Iterator[Entry]:
        """Yield the entries that wait, in the order in which they are served."""
        for level, lane in enumerate(self.lanes):
            while lane and not lane[0].waits_at(level):
                lane.popleft()
            for entry in lane:
                if entry.waits_at(level):
                    yield entry


class EntryRows(NamedTuple):
    """Rows of one entry in a batch."""

    entry: Entry
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Dispatch:
    """A batch that an instance is to run."""

    parts: tuple[EntryRows, ...]
    rows: int
    reason: Reason
    at: float
