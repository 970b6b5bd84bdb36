# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interrupted waits, background calls and pools of execution contexts hold nobody up afterwards."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from interrupting import press, press_when

from xpuruntime.engines.tensorrt.handle import Slots
from xpuruntime.errors import OutOfMemoryError
from xpuruntime.runtime.interruptible_waits import BackgroundCall, ConditionVariable, Latch, uninterrupted

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
WAIT = 30.0


def test_a_latch_wakes_all_and_waits_no_longer_than_asked() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    assert not latch.is_set()
    calls = [BackgroundCall(latch.wait, f"waiter-{number}") for number in range(5)]
    latch.set()
    latch.set()
    assert [call.result() for call in calls] == [True] * 5


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


class _Held:
    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


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
    for call in calls:
        call.result()
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


def test_ctrl_c_inside_of_an_uninterrupted_call_is_handled_after_it() -> None:
    done: list[str] = []

    def work() -> None:
        press()
        uninterrupted(lambda: done.append("inner"))
        done.append("outer")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("name", ["SIGALRM", "SIGTERM", "SIGHUP"])
def test_so_is_another_signal_whose_handler_raises(name: str) -> None:
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    done: list[str] = []

    def work() -> None:
        signal.raise_signal(number)
        uninterrupted(lambda: done.append("inner"))
        done.append("outer")

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(number, end)
    try:
        with pytest.raises(TimeoutError):
            uninterrupted(work)
        assert done == ["inner", "outer"]
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_no_signal_is_lost_where_the_handler_of_another_raises() -> None:
    handled = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    try:
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [signal.SIGTERM]


def test_ctrl_c_ends_a_wait_for_a_latch_and_a_condition() -> None:
    latch, lock = Latch(), threading.Lock()
    thread = press_when(lambda: latch._waiting)
    with pytest.raises(KeyboardInterrupt):
        latch.wait()
    thread.join()
    changed = ConditionVariable(lock)
    thread = press_when(lambda: changed._waiting and changed._waiting[0]._waiting)
    with pytest.raises(KeyboardInterrupt):
        changed.wait_for(lambda: False)
    thread.join()
    with lock:
        changed.notify_all()
    latch.set()
    assert latch.wait(WAIT)
