# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interrupted waits, background calls and pools of execution contexts hold nobody up afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from interrupting import WAYS, sweep

from xpuruntime.engines.tensorrt.slots import Slots
from xpuruntime.errors import OutOfMemoryError, XpuRuntimeError
from xpuruntime.runtime.interruptible_waits import BackgroundCall, ConditionVariable, Latch, uninterrupted
from xpuruntime.tuning.measurements import Measurements

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
WAIT = 30.0


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_for_a_latch(way: str) -> None:
    latches: list[Latch] = []

    def work() -> None:
        latch = Latch()
        latches[:] = [latch]
        call = BackgroundCall(latch.set, "setter")
        latch.wait()
        call.result()

    def check() -> None:
        if latches:
            latches[0].set()
            assert latches[0].wait(WAIT)

    assert sweep(way, work, check, 400) > 0


def test_a_latch_wakes_all_and_waits_no_longer_than_asked() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.is_set()
    calls = [BackgroundCall(latch.wait, f"waiter-{number}") for number in range(5)]
    latch.set()
    latch.set()
    assert [one.result() for one in calls] == [True] * 5


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")
def test_a_signal_handler_sets_the_latch_that_its_thread_waits_for() -> None:
    for _ in range(50):
        latch = Latch()
        before = signal.signal(signal.SIGUSR1, lambda *_, latch=latch: latch.set())
        try:
            call = BackgroundCall(lambda: os.kill(os.getpid(), signal.SIGUSR1), "killer")
            assert latch.wait(WAIT)
            call.result()
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_for_a_condition(way: str) -> None:
    lock = threading.Lock()
    changed = ConditionVariable(lock)
    number = 0

    def add() -> None:
        nonlocal number
        with lock:
            number += 1
            changed.notify_all()

    def work() -> None:
        want = number + 1
        call = BackgroundCall(add, "adder")
        assert changed.wait_for(lambda: number >= want, WAIT)
        call.result()

    def check() -> None:
        assert lock.acquire(timeout=WAIT)
        lock.release()
        call = BackgroundCall(add, "adder")
        call.done.wait(WAIT)

    assert sweep(way, work, check, 300) > 0
    assert not changed.wait_for(lambda: False, 0.01)


def test_a_background_call_raises_what_its_function_raised() -> None:
    def fail() -> None:
        raise ValueError("not so")

    call = BackgroundCall(fail, "failing")
    with pytest.raises(ValueError, match="not so"):
        call.result()
    with pytest.raises(ValueError, match="not so"):
        uninterrupted(fail)
    assert isinstance(call.error, ValueError)


class _Device:
    """What measures until it is ended."""

    def __init__(self) -> None:
        self.killed = Latch()

    def kill(self) -> None:
        self.killed.set()


@pytest.mark.parametrize("way", WAYS)
def test_measuring_on_several_devices(way: str) -> None:
    def work() -> None:
        devices: Any = [_Device(), _Device()]
        measurements = Measurements(None, devices, lambda: 0.0)  # type: ignore[arg-type]
        stopped = [measurements.run_in_parallel([lambda: 1, lambda: 2])]
        assert stopped == [[1, 2]]

        def fail() -> int:
            raise ValueError("of the first")

        with pytest.raises(ValueError, match="of the first"):
            measurements.run_in_parallel([fail, lambda: devices[1].killed.wait()])

    def settled() -> None:
        end = time.monotonic() + WAIT
        while any(one.name.startswith("xpuruntime-tune") for one in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0)

    assert sweep(way, work, settled, 150) > 0


class _Held:
    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


@pytest.mark.parametrize("way", WAYS)
def test_taking_turns_at_execution_contexts(way: str) -> None:
    slots: Slots = Slots(_Held, 2)  # type: ignore[arg-type]

    def work() -> None:
        for _ in range(100):
            with slots.slot():
                pass

    def check() -> None:
        # No slot is lost, and none is held by two.
        with slots.slot() as first, slots.slot() as second:
            assert first is not second

    assert sweep(way, work, check, 300) > 0
    slots.close()
    slots.close()
    with pytest.raises(XpuRuntimeError, match="closed"):
        slots.slot().__enter__()


def test_threads_wait_for_a_context_and_close_waits_for_them() -> None:
    made: list[_Held] = []

    def make() -> Any:
        made.append(_Held())
        return made[-1]

    slots = Slots(make, 2)
    held, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal held, most
        for _ in range(50):
            with slots.slot():
                with lock:
                    held += 1
                    most = max(most, held)
                with lock:
                    held -= 1

    calls = [BackgroundCall(work, f"user-{number}") for number in range(6)]
    for one in calls:
        one.result()
    assert most <= 2
    turn = slots.slot()
    turn.__enter__()
    closing = BackgroundCall(slots.close, "closer")
    assert not closing.done.wait(0.05)
    turn.__exit__(None, None, None)
    closing.result()
    assert not any(one.open for one in made)


def test_a_context_for_which_there_is_no_memory_is_asked_for_again() -> None:
    answers: list[Any] = [None, OutOfMemoryError("no memory.", engine="tensorrt", device="cuda:0"), None]

    def make() -> Any:
        if (answer := answers.pop(0)) is not None:
            raise answer
        return _Held()

    slots = Slots(make, 2)
    with slots.slot():
        with pytest.raises(OutOfMemoryError, match="state fewer contexts"):
            slots.slot().__enter__()
        with slots.slot():
            assert not answers
