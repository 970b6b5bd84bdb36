# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Scheduler`: which requests run together, and when. A state machine without threads, clocks and arrays.

Its inputs are arrivals, completions and cancels, each with the time; its outputs are batches to run and which requests
have an answer. Times are seconds of any monotonic clock. Nothing here is safe to call from two threads at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xpuruntime.serving.batching.settings import AdaptiveDelay, SerialDevice

if TYPE_CHECKING:
    from xpuruntime.serving.batching.settings import BatchSettings

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
    """The queue has as many requests as it may have, or takes none any more."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"retry after {retry_after:.3f} s")
        self.retry_after = retry_after


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the queue or running."""

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
    """Entries of one group that wait, by level."""

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


#: Weight of the latest execution in the expected time of one.
_LATEST = 0.2
#: Seconds until a retry where no execution has been timed yet.
_UNKNOWN = 0.1


class Scheduler:
    """Puts requests together."""

    def __init__(self, settings: BatchSettings, instances: int = 1, *, serial: bool = False) -> None:
        self._most = settings.max_batch_size
        self._preferred = frozenset(settings.preferred_batch_size)
        self._delay = settings.max_queue_delay_us * 1e-6
        self._adaptive = AdaptiveDelay(self._delay) if self._delay and settings.queue_delay == "adaptive" else None
        self._limit = settings.max_queue_size
        self._isolate = settings.isolate_failures
        self._instances = instances
        self._device = SerialDevice() if serial else None
        #: Level of the entries past their timeout: after all others.
        self._last = settings.priority_levels + 1
        #: Rows from which a group may be worth sending before its delay is over.
        self._ripe_at = min((*self._preferred, max(self._most, 1)))
        self._groups: dict[Hashable, Group] = {}
        self._lanes: tuple[deque[Entry], ...] = tuple(deque() for _ in range(self._last + 1))
        self._ripe: dict[Hashable, None] = {}
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._overdue: list[tuple[float, int, Entry]] = []
        self._retries: deque[EntryRows] = deque()
        self._ordered: deque[Entry] | None = deque() if settings.preserve_ordering else None
        self._ready: list[Entry] = []
        self._open: dict[Entry, None] = {}
        self._numbers = 0
        #: Whether no request is taken any more.
        self.draining = False
        #: Entries that wait, with their rows; batches that run; seconds of one.
        self.waiting = self.waiting_rows = self.running = 0
        #: Requests that run past the queue; they are among those that run.
        self.alone = 0
        self.expected: float | None = None

    @property
    def idle(self) -> bool:
        """Whether an instance has nothing to do."""
        return self.running < self._instances

    @property
    def unanswered(self) -> int:
        """How many requests have no answer yet."""
        return len(self._open) + self.alone

    def submit(self, entry: Entry) -> None:
        """Take a request."""
        if self.draining:
            raise QueueFull(0.0)
        if self._limit and self.waiting >= self._limit:
            raise QueueFull(self.retry_after())
        entry.number = self._numbers
        self._numbers += 1
        self.waiting += 1
        self._open[entry] = None
        if self._ordered is not None:
            self._ordered.append(entry)
        if self._most == 0:
            entry.rows = 1
        self.waiting_rows += entry.rows
        group = self._groups.get(entry.group)
        if group is None:
            group = self._groups[entry.group] = Group(self._last + 1)
        if self._adaptive is not None:
            self._adaptive.arrived(entry.group, entry.arrived, group.rows if self.idle else 0, group.latest)
        group.lanes[entry.level].append(entry)
        self._lanes[entry.level].append(entry)
        group.rows += entry.rows
        group.latest = entry.arrived
        if group.rows >= self._ripe_at:
            self._ripe[entry.group] = None
        if entry.deadline is not None:
            heapq.heappush(self._deadlines, (entry.deadline, entry.number, entry))
        if entry.overdue is not None:
            heapq.heappush(self._overdue, (entry.overdue, entry.number, entry))

    def retry_after(self) -> float:
        """Return seconds after which what waits now has probably been served."""
        if self.expected is None:
            return max(self._delay, _UNKNOWN)
        batches = self.running + -(-self.waiting_rows // max(self._most, 1))
        return max(self._delay, self.expected * batches / self._instances)

    def cancel(self, entry: Entry) -> None:
        """Drop a request whose answer nobody wants any more. One that has its answer stays as it is."""
        self._settle(entry, "cancelled")

    def expire(self, now: float) -> None:
        """Expire the requests whose deadline has passed, and put those past their timeout behind the others."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].outcome != "waiting"):
            self._settle(heapq.heappop(self._deadlines)[2], "expired")
        while self._overdue and self._overdue[0][0] <= now:
            entry = heapq.heappop(self._overdue)[2]
            if entry.outcome == "waiting" and entry.sent < entry.rows:
                entry.level = self._last
                self._groups[entry.group].lanes[self._last].append(entry)
                self._lanes[self._last].append(entry)

    def dispatch(self, now: float) -> Dispatch | None:
        """Return the batch to run now, or ``None`` where all instances are busy or waiting for more is better."""
        if not self.idle:
            return None
        while self._retries:
            part = self._retries.popleft()
            if part.entry.outcome == "waiting":
                return self._sent((part,), "retry", now)
        for group, due in self._candidates(now):
            formed = self._form(self._groups[group], due)
            if formed is None:
                continue
            adaptive = self._adaptive if formed[2] == "adaptive" else None
            if adaptive is not None and adaptive.probes(group):
                continue
            return self._send(group, *formed, now)
        return None

    def complete(
        self, batch: Dispatch, now: float, error: BaseException | None = None, *, preparation: float = 0.0
    ) -> None:
        """Take the result of a batch: its rows are done, or all of them failed."""
        if self._adaptive is not None:
            self._adaptive.ended(batch, now, idle=self.idle)
        if self._device is not None:
            self._device.ended(batch, now, preparation)
        self.running -= 1
        took = now - batch.at
        self.expected = took if self.expected is None else self.expected + _LATEST * (took - self.expected)
        alone = len(batch.parts) == 1
        for part in batch.parts:
            entry = part.entry
            if entry.outcome != "waiting":
                continue
            if error is None:
                entry.done += part.stop - part.start
                if entry.done == entry.rows:
                    self._settle(entry, "done")
            elif self._isolate and not alone and not entry.retried:
                entry.retried = True
                self._retries.append(part)
            else:
                entry.error = error
                self._settle(entry, "failed")

    def begin_alone(self) -> bool:
        """Take an instance for a request that runs past the queue; return whether nothing else runs or waits."""
        if self.draining or self.running or self.waiting or self._retries:
            return False
        self.running = self.alone = 1
        return True

    def end_alone(self) -> None:
        """Give the instance of `begin_alone` back."""
        self.running -= 1
        self.alone = 0

    def drain(self) -> None:
        """Take no request any more, and send what waits without delay."""
        self.draining = True

    def take_ready(self) -> list[Entry]:
        """Return the requests that have got an answer since the last call; each is returned once."""
        ready, self._ready = self._ready, []
        return ready

    def next_expiry(self) -> float | None:
        """Return when `expire` will have something to do, if ever."""
        first = self.next_deadline()
        while self._overdue and not self._overdue[0][2].waits_at(self._overdue[0][2].level):
            heapq.heappop(self._overdue)
        times = [] if first is None else [first]
        if self._overdue:
            times.append(self._overdue[0][0])
        return min(times, default=None)

    def next_dispatch(self) -> float | None:
        """Return when `dispatch` will have something to do although nothing else happens, if ever."""
        if not self.idle or not self.waiting:
            return None
        times = [self._due(head)[0] for head in self._heads()]
        if (urgent := self._most_urgent()) is not None:
            times.append(urgent[0])
        return min(times, default=None)

    def next_deadline(self) -> float | None:
        """Return the first deadline of a request without an answer."""
        while self._deadlines and self._deadlines[0][2].outcome != "waiting":
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def unsettled(self) -> list[Entry]:
        """Return the requests without an answer, in no order."""
        return list(self._open)

    def oldest(self) -> Entry | None:
        """Return the entry that has waited longest."""
        return min(self._heads(), key=lambda entry: entry.arrived, default=None)

    def _heads(self) -> list[Entry]:
        heads = []
        for level, lane in enumerate(self._lanes):
            while lane and not lane[0].waits_at(level):
                lane.popleft()
            if lane:
                heads.append(lane[0])
        return heads

    def _due(self, head: Entry) -> tuple[float, Reason]:
        due = head.arrived + self._delay
        reason: Reason = "delay" if self._delay else "idle"
        if self._adaptive is not None:
            group = self._groups[head.group]
            until = self._adaptive.until(head.group, group.rows, group.latest)
            if until is not None and until < due:
                due, reason = until, "adaptive"
        if self._device is not None and (hold := self._device.hold_until()) is not None and hold > due:
            due, reason = hold, "busy"
        return due, reason

    def _most_urgent(self) -> tuple[float, Entry] | None:
        if self._delay == 0 or self.expected is None:
            return None
        first = self.next_deadline()
        if first is None or not (entry := self._deadlines[0][2]).waits_at(entry.level):
            return None
        return first - self.expected, entry

    def _candidates(self, now: float) -> list[tuple[Hashable, Reason | None]]:
        """Return the groups that may be sent, in the order of their first entries, with the reason if time is it."""
        candidates: dict[Hashable, tuple[tuple[int, int], Reason | None]] = {}
        for head in self._heads():
            if head.group in candidates:
                continue
            due, reason = self._due(head)
            if self.draining or due <= now:
                candidates[head.group] = ((head.level, head.number), "drain" if self.draining else reason)
        urgent = self._most_urgent()
        if urgent is not None and urgent[0] <= now and urgent[1].group not in candidates:
            candidates[urgent[1].group] = ((urgent[1].level, urgent[1].number), "deadline")
        for group in self._ripe:
            if group not in candidates:
                first = next(self._groups[group].waiting())
                candidates[group] = ((first.level, first.number), None)
        return [(group, reason) for group, (_, reason) in sorted(candidates.items(), key=lambda item: item[1][0])]

    def _form(self, group: Group, due: Reason | None) -> tuple[list[EntryRows], int, Reason] | None:
        """Return the parts of the next batch of a group, or ``None`` where it is better to wait for more."""
        if self._most == 0:
            entry = next(group.waiting())
            return [EntryRows(entry, 0, entry.rows)], 1, "drain" if due == "drain" else "full"
        parts: list[EntryRows] = []
        rows, preferred, full = 0, 0, False
        for entry in group.waiting():
            left, room = entry.rows - entry.sent, self._most - rows
            if left > room:
                full = True
                if left > self._most and room:  # it never fits whole
                    parts.append(EntryRows(entry, entry.sent, entry.sent + room))
                    rows += room
                break
            parts.append(EntryRows(entry, entry.sent, entry.rows))
            rows += left
            if rows in self._preferred:
                preferred = len(parts)
            if rows == self._most:
                full = True
                break
        if full:
            return parts, rows, "full"
        if preferred and due in (None, "idle"):
            parts = parts[:preferred]
            return parts, sum(part.stop - part.start for part in parts), "preferred"
        return None if due is None else (parts, rows, due)

    def _send(self, key: Hashable, parts: list[EntryRows], rows: int, reason: Reason, now: float) -> Dispatch:
        group = self._groups[key]
        waited = group.rows
        for entry, start, stop in parts:
            entry.sent = stop
            group.rows -= stop - start
            self.waiting_rows -= stop - start
            if stop == entry.rows:
                self.waiting -= 1
        self._shrunk(key, group)
        batch = self._sent(tuple(parts), reason, now, rows)
        if self._adaptive is not None:
            self._adaptive.sent(key, batch, waited, group.latest)
        return batch

    def _sent(self, parts: tuple[EntryRows, ...], reason: Reason, now: float, rows: int | None = None) -> Dispatch:
        self.running += 1
        if rows is None:
            rows = sum(part.stop - part.start for part in parts)
        batch = Dispatch(parts, rows, reason, now)
        if self._device is not None:
            self._device.began(batch)
        return batch

    def _shrunk(self, key: Hashable, group: Group) -> None:
        if group.rows < self._ripe_at:
            self._ripe.pop(key, None)
        if not group.rows:
            del self._groups[key]

    def _settle(self, entry: Entry, outcome: Outcome) -> None:
        if entry.outcome != "waiting":
            return
        entry.outcome = outcome
        del self._open[entry]
        left = entry.rows - entry.sent
        if left:
            self.waiting -= 1
            self.waiting_rows -= left
            group = self._groups[entry.group]
            group.rows -= left
            self._shrunk(entry.group, group)
        if self._ordered is None:
            self._ready.append(entry)
            return
        if outcome in ("expired", "cancelled"):  # reported at once, and out of the order
            self._ready.append(entry)
        while self._ordered and self._ordered[0].outcome != "waiting":
            first = self._ordered.popleft()
            if first.outcome in ("done", "failed"):
                self._ready.append(first)
