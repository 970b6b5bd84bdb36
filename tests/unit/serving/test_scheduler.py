# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Scheduler` under a virtual clock: what is sent when and why, and invariants of any history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xpuruntime.serving.batching.scheduler import REASONS, Dispatch, Entry, QueueFull, Scheduler
from xpuruntime.serving.batching.settings import BatchSettings

US = 1e-6


def entry(arrived: float, rows: int = 1, **more: Any) -> Entry:
    return Entry(rows, more.pop("group", "g"), arrived, **more)


def scheduler(instances: int = 1, **more: Any) -> Scheduler:
    return Scheduler(BatchSettings(**{"max_batch_size": 4, **more}), instances)


def sizes(batch: Dispatch | None) -> tuple[int, str] | None:
    return None if batch is None else (batch.rows, batch.reason)


def test_without_a_delay_an_idle_instance_is_sent_what_there_is() -> None:
    one = scheduler()
    one.submit(entry(0))
    first = one.dispatch(0)
    assert sizes(first) == (1, "idle")
    for at in range(6):
        one.submit(entry(at))
    assert one.dispatch(6) is None, "the only instance is busy"
    one.complete(first, 7)
    second = one.dispatch(7)
    assert sizes(second) == (4, "full")
    one.complete(second, 8)
    assert sizes(one.dispatch(8)) == (2, "idle")


def test_a_delay_waits_for_others_and_not_longer() -> None:
    one = scheduler(max_queue_delay_us=100)
    one.submit(entry(0))
    assert one.dispatch(50 * US) is None
    assert one.next_dispatch() == pytest.approx(100 * US)
    one.submit(entry(60 * US))
    assert sizes(one.dispatch(100 * US)) == (2, "delay")


def test_a_preferred_size_does_not_wait_and_the_largest_is_taken() -> None:
    one = scheduler(max_batch_size=8, preferred_batch_size=[2, 4], max_queue_delay_us=10**6)
    one.submit(entry(0))
    assert one.dispatch(0) is None
    for _ in range(4):
        one.submit(entry(0))
    assert sizes(one.dispatch(0)) == (4, "preferred")


def test_a_delay_that_is_over_sends_more_than_a_preferred_size() -> None:
    one = scheduler(2, max_batch_size=8, preferred_batch_size=[4], max_queue_delay_us=100)
    for rows in (3, 3):
        one.submit(entry(0, rows))
    assert one.dispatch(0) is None
    assert sizes(one.dispatch(100 * US)) == (6, "delay")


def test_a_deadline_ends_the_delay_early_enough_to_be_met() -> None:
    one = scheduler(max_queue_delay_us=10**6)
    one.submit(entry(0))
    first = one.dispatch(1)
    one.complete(first, 1.25)  # an execution takes 0.25 s
    one.submit(entry(2, deadline=2.5))
    assert one.dispatch(2.2) is None
    assert one.next_dispatch() == pytest.approx(2.25)
    assert sizes(one.dispatch(2.25)) == (1, "deadline")


def test_a_deadline_expires_while_the_model_is_busy_and_while_it_runs_the_request() -> None:
    one = scheduler()
    running, waiting, later = entry(0, deadline=5), entry(0, group="h", deadline=3), entry(0, deadline=9)
    one.submit(running)
    batch = one.dispatch(0)
    one.submit(waiting)
    one.submit(later)
    assert one.next_expiry() == 3
    one.expire(3)
    assert one.take_ready() == [waiting]
    one.expire(6)
    assert one.take_ready() == [running]
    one.complete(batch, 7)
    assert one.take_ready() == [], "it has its answer"
    assert [one.outcome for one in (running, waiting, later)] == ["expired", "expired", "waiting"]
    assert sizes(one.dispatch(7)) == (1, "idle")


def test_past_a_timeout_that_delays_a_request_is_served_after_the_others() -> None:
    one = scheduler(max_batch_size=1, timeout_us=10**6, timeout_action="delay")
    late, other = entry(0, overdue=1), entry(0.5, overdue=1.5)
    for each in (late, other):
        one.submit(each)
    one.expire(1.2)
    first = one.dispatch(1.2)
    assert first.parts[0].entry is other
    one.complete(first, 1.3)
    assert one.dispatch(1.3).parts[0].entry is late


def test_a_full_queue_says_when_to_retry() -> None:
    one = scheduler(max_queue_size=3)
    one.submit(entry(0))
    batch = one.dispatch(0)
    for _ in range(3):
        one.submit(entry(0))
    with pytest.raises(QueueFull) as full:
        one.submit(entry(0))
    assert full.value.retry_after > 0
    one.complete(batch, 2.0)
    running = one.dispatch(2.0)
    for _ in range(3):
        one.submit(entry(2.0))
    with pytest.raises(QueueFull) as full:
        one.submit(entry(2.0))
    assert full.value.retry_after == pytest.approx(4.0), "one batch runs, one waits, each of 2 s"
    one.complete(running, 4.0)


def test_a_request_above_the_size_is_split_and_one_below_is_not() -> None:
    one = scheduler(3)
    large, small = entry(0, 9), entry(0, 3)
    one.submit(large)
    one.submit(small)
    parts = [[(part.entry, part.start, part.stop) for part in one.dispatch(0).parts] for _ in range(2)]
    assert parts == [[(large, 0, 4)], [(large, 4, 8)]]
    third = one.dispatch(0)
    assert [(part.entry, part.start, part.stop) for part in third.parts] == [(large, 8, 9), (small, 0, 3)]


def test_draining_takes_nothing_and_waits_for_nothing() -> None:
    one = scheduler(max_queue_delay_us=10**6)
    one.submit(entry(0))
    one.drain()
    with pytest.raises(QueueFull):
        one.submit(entry(0))
    assert sizes(one.dispatch(0)) == (1, "drain")


class World:
    """Instances and a clock around a scheduler, with every invariant checked at each step."""

    def __init__(self, wanted: BatchSettings, instances: int) -> None:
        self.wanted, self.instances = wanted, instances
        self.scheduler = Scheduler(wanted, instances)
        self.now = 0.0
        self.running: list[Dispatch] = []
        self.accepted: list[Entry] = []
        self.answers: list[Entry] = []
        self.covered: dict[Entry, list[tuple[int, int]]] = {}
        self.failing: set[Entry] = set()

    def check_batch(self, batch: Dispatch) -> None:
        most = self.wanted.max_batch_size
        assert batch.parts
        assert batch.reason in REASONS
        assert batch.rows == sum(part.stop - part.start for part in batch.parts)
        if most:
            assert batch.rows <= most
        else:
            assert len(batch.parts) == 1
        assert len({part.entry.group for part in batch.parts}) == 1
        assert len({part.entry for part in batch.parts}) == len(batch.parts)
        if batch.reason == "preferred":
            assert batch.rows in self.wanted.preferred_batch_size
        if batch.reason != "retry":
            last = max((part.entry.level, part.entry.number) for part in batch.parts)
            (group,) = {part.entry.group for part in batch.parts}
            left = [one for one in self.accepted if one.group == group and self.waits(one)]
            assert all((one.level, one.number) >= last for one in left), "one that goes first was left behind"
        for part in batch.parts:
            assert part.entry.outcome == "waiting", "an answered request is not run"
            assert 0 <= part.start < part.stop <= part.entry.rows
            if batch.reason != "retry":
                for start, stop in self.covered.setdefault(part.entry, []):
                    assert part.stop <= start or part.start >= stop, "rows are sent once"
                self.covered[part.entry].append((part.start, part.stop))

    def waits(self, one: Entry) -> bool:
        return one.outcome == "waiting" and one.sent < one.rows

    def step(self) -> None:
        self.scheduler.expire(self.now)
        while (batch := self.scheduler.dispatch(self.now)) is not None:
            self.check_batch(batch)
            self.running.append(batch)
            assert len(self.running) <= self.instances
        if len(self.running) < self.instances and self.scheduler.waiting:
            heads = [one for one in self.accepted if one.outcome == "waiting" and one.sent < one.rows]
            oldest = min(heads, key=lambda head: head.arrived)
            assert self.now < oldest.arrived + self.wanted.max_queue_delay_us * US, "an instance idles past the delay"
        for one in self.scheduler.take_ready():
            assert one not in self.answers, "answered twice"
            self.answers.append(one)
            if one.outcome == "done":
                assert sorted(self.covered[one])[0][0] == 0
                assert sum(stop - start for start, stop in self.covered[one]) == one.rows
        for one in self.accepted:
            if one.deadline is not None and one.deadline <= self.now:
                assert one.outcome != "waiting", "a deadline has passed and nothing was said"
        waiting = [one for one in self.accepted if one.outcome == "waiting" and one.sent < one.rows]
        assert self.scheduler.waiting == len(waiting)
        assert self.scheduler.waiting_rows == sum(one.rows - one.sent for one in waiting)
        assert self.scheduler.unanswered == sum(one.outcome == "waiting" for one in self.accepted)

    def end(self, index: int) -> None:
        if self.running:
            batch = self.running.pop(index % len(self.running))
            bad = any(part.entry in self.failing for part in batch.parts)
            self.scheduler.complete(batch, self.now, ValueError() if bad else None)


SETTINGS = st.builds(
    dict,
    max_batch_size=st.integers(0, 6),
    preferred=st.sets(st.integers(1, 6), max_size=2),
    max_queue_delay_us=st.sampled_from([0, 0, 1_000_000, 3_000_000]),
    queue_delay=st.sampled_from(["adaptive", "fixed"]),
    max_queue_size=st.sampled_from([0, 3, 1024]),
    preserve_ordering=st.booleans(),
    priority_levels=st.sampled_from([0, 3]),
    isolate_failures=st.booleans(),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"),
            st.integers(1, 9),
            st.sampled_from("aab"),
            st.one_of(st.none(), st.floats(0.1, 6)),
            st.integers(1, 3),
            st.booleans(),
        ),
        st.tuples(st.just("wait"), st.floats(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SETTINGS, st.integers(1, 3), EVENTS)
def test_any_history(wanted: dict, instances: int, events: list) -> None:
    most = wanted["max_batch_size"]
    wanted["preferred_batch_size"] = sorted(size for size in wanted.pop("preferred") if size <= most)
    if wanted["preserve_ordering"]:
        wanted["priority_levels"] = 0
    world = World(BatchSettings(**wanted), instances)
    for name, *facts in events:
        if name == "arrive":
            rows, group, deadline, level, fails = facts
            one = Entry(
                rows if most else 1,
                group,
                world.now,
                None if deadline is None else world.now + deadline,
                level=level if wanted["priority_levels"] else 0,
            )
            if fails:
                world.failing.add(one)
            limit = wanted["max_queue_size"]
            try:
                world.scheduler.submit(one)
                world.accepted.append(one)
            except QueueFull:
                assert limit
                assert world.scheduler.waiting == limit
        elif name == "wait":
            world.now += facts[0]
        elif name == "end":
            world.end(facts[0])
        elif world.accepted:
            world.scheduler.cancel(world.accepted[facts[0] % len(world.accepted)])
        world.step()
    world.scheduler.drain()
    for _ in range(1000):
        world.step()
        if not world.running:
            break
        world.end(0)
    world.step()
    assert set(world.answers) == set(world.accepted), "every accepted request has one answer"
    done = [answer for answer in world.answers if answer.outcome in ("done", "failed")]
    if wanted["preserve_ordering"]:
        assert done == sorted(done, key=lambda one: one.number)
    for one in done:
        if one.outcome == "failed" and wanted["isolate_failures"] and one.rows <= max(most, 1):
            assert one in world.failing, "a neighbour's failure is not its own"
        if one.outcome == "done":
            assert one not in world.failing
