# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What excludes what among the CUDA sessions of a process; the sessions themselves are tests of the GPU."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from interrupting import press

from xpuruntime.engines.onnxruntime import device_arrays as cuda_turns
from xpuruntime.engines.onnxruntime.device_arrays import between_captures, capturing_alone, new_turn, no_capture

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT = 30.0


class Inside(threading.Thread):
    """A thread that enters a block, says so, and stays in it until it is let out."""

    def __init__(self, block: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._block, self.inside, self.out = block, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._block():
            self.inside.set()
            assert self.out.wait(WAIT)

    def leave(self) -> None:
        self.out.set()
        self.join(WAIT)
        assert not self.is_alive()


def enters(thread: Inside) -> bool:
    return thread.inside.wait(WAIT)


def waits(thread: Inside) -> bool:
    return not thread.inside.wait(0.05)


def test_sessions_go_on_side_by_side() -> None:
    one, other = new_turn(), new_turn()
    first, second = Inside(lambda: one), Inside(lambda: other)
    assert enters(first)
    assert enters(second)
    third = Inside(lambda: one)
    assert waits(third)
    for thread in (first, second, third):
        thread.leave()


def test_a_capture_waits_for_runs_and_holds_all_sessions() -> None:
    one, other = new_turn(), new_turn()
    run = Inside(lambda: one)
    assert enters(run)
    capture = Inside(capturing_alone)
    assert waits(capture)
    run.leave()
    assert enters(capture)
    later = [Inside(lambda: one), Inside(lambda: other), Inside(no_capture), Inside(capturing_alone)]
    assert all(waits(thread) for thread in later)
    for thread in later:
        thread.out.set()  # they exclude each other, too
    capture.leave()
    for thread in later:
        thread.leave()
        assert thread.inside.is_set()


def test_no_session_is_opened_beside_a_capture_and_several_are_beside_each_other() -> None:
    first, second = Inside(no_capture), Inside(no_capture)
    assert enters(first)
    assert enters(second)
    capture = Inside(capturing_alone)
    assert waits(capture)
    first.leave()
    assert waits(capture)
    second.leave()
    assert enters(capture)
    capture.leave()


def test_runs_of_host_arrays_let_a_capture_go_first() -> None:
    """So that a capture comes to its turn, however many runs overlap."""
    first, second = Inside(between_captures), Inside(between_captures)
    assert enters(first)
    assert enters(second)
    capture = Inside(capturing_alone)
    assert waits(capture)
    later = Inside(between_captures)
    assert waits(later)
    first.leave()
    assert waits(capture)
    second.leave()
    assert enters(capture)
    assert waits(later)
    capture.leave()
    assert enters(later)
    later.leave()


def test_opening_may_open_another() -> None:
    def nested() -> None:
        with no_capture(), no_capture():
            pass

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_an_error_lets_others_in() -> None:
    turn = new_turn()
    for block in (capturing_alone, no_capture):
        try:
            with block():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        thread = Inside(capturing_alone)
        assert enters(thread)
        thread.leave()
    assert turn.acquire(timeout=WAIT)
    turn.release()


BLOCKS = [no_capture, between_captures, capturing_alone]


def nothing_is_held(turns: list[Any]) -> None:
    assert not cuda_turns._working
    assert not cuda_turns._waiting
    assert not cuda_turns._capturing
    assert not any(turn.locked() for turn in turns)
    free: list[bool] = []

    def take() -> None:
        free.append(cuda_turns._lock.acquire(timeout=WAIT))
        cuda_turns._lock.release()

    thread = threading.Thread(target=take, daemon=True)  # another one, since the lock's owner may take it again
    thread.start()
    thread.join(WAIT)
    assert free == [True]


@pytest.mark.parametrize("block", BLOCKS)
def test_an_interruption_holds_nobody_up(block: Callable[[], Any]) -> None:
    turns = [new_turn() for _ in range(3)]
    with pytest.raises(KeyboardInterrupt), block():
        press()
    nothing_is_held(turns)


@pytest.mark.parametrize(("block", "beside"), [(no_capture, capturing_alone), (between_captures, capturing_alone),
                                               (capturing_alone, no_capture)])  # fmt: skip
def test_a_wait_can_be_interrupted(block: Callable[[], Any], beside: Callable[[], Any]) -> None:
    holder = Inside(beside)
    assert enters(holder)
    me = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(me, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), block():
        pass
    timer.join()
    holder.leave()
    nothing_is_held([])
