# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RunThreads`: an accepted call completes or is cancelled, whenever it is closed; and what a fork waits for."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest

import xpuruntime as xrt
from xpuruntime.engines.run_threads import InterruptibleFuture, RunThreads

if TYPE_CHECKING:
    from collections.abc import Iterator

FEEDS = {"image": np.random.default_rng(7).random((8, 1, 8, 8), np.float32)}
ENGINES = ["onnxruntime", "null", pytest.param("openvino", marks=pytest.mark.needs_module("openvino"))]


class Paused(RunThreads):
    """Its threads stop where they have taken a call from the queue and not begun it."""

    def __init__(self) -> None:
        self.taken, self.go = threading.Event(), threading.Event()
        super().__init__(1)

    def _next(self) -> Any:
        job = super()._next()
        if job is not None:
            self.taken.set()
            assert self.go.wait(30)
        return job


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_a_call_that_a_thread_has_taken_is_cancelled_where_it_has_not_begun() -> None:
    threads = Paused()
    ran: list[int] = []
    future = threads.submit(lambda: {"ran": ran.append(1)})
    assert threads.taken.wait(30)
    threads.close()
    threads.go.set()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(30)
    assert not ran
    with pytest.raises(xrt.XpuRuntimeError, match="this session is closed"):
        threads.submit(dict)


def test_closing_waits_for_a_call_that_has_begun() -> None:
    threads = RunThreads(2)
    began, release, closed = threading.Event(), threading.Event(), threading.Event()

    def work() -> dict[str, Any]:
        began.set()
        assert release.wait(30)
        return {"closed": closed.is_set()}

    future = threads.submit(work)
    assert began.wait(30)
    closer = threading.Thread(target=lambda: (threads.close(), closed.set()))
    closer.start()
    assert not closed.wait(0.1)
    release.set()
    assert future.result(30) == {"closed": False}
    closer.join(30)
    assert closed.is_set()


def test_a_call_and_its_callback_may_close_what_runs_them() -> None:
    threads = RunThreads(1)
    assert threads.submit(lambda: {"closed": threads.close()}).result(30) == {"closed": None}
    others = RunThreads(1)
    go, done = threading.Event(), threading.Event()
    future = others.submit(lambda: {"went": go.wait(30)})
    future.add_done_callback(lambda _: (others.close(), done.set()))
    go.set()
    assert done.wait(30)


@pytest.fixture(scope="module")
def want() -> Any:
    raw = onnxruntime.InferenceSession(str(xrt.demo_model_path()), providers=["CPUExecutionProvider"])
    return raw.run(["logits"], FEEDS)[0]


def _hand_over(session: xrt.InferenceSession, futures: list[Any], start: threading.Barrier) -> None:
    def until_closed() -> None:
        while True:
            futures.append(session.run_async(FEEDS))

    start.wait(30)
    with pytest.raises(xrt.XpuRuntimeError, match="this session is closed"):
        until_closed()


@pytest.mark.parametrize("engine", ENGINES)
def test_each_accepted_request_completes_or_is_cancelled(engine: str, want: Any) -> None:
    """Also those that other threads hand over while the session is being closed."""
    counts = {"done": 0, "cancelled": 0}
    for _ in range(12):
        session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=engine)
        session.run(FEEDS)
        futures: list[concurrent.futures.Future[dict[str, Any]]] = []
        start = threading.Barrier(3)

        arguments = (session, futures, start)
        threads = [threading.Thread(target=_hand_over, args=arguments) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait(30)
        while not futures:
            pass
        session.close()
        for thread in threads:
            thread.join(30)
        done, left = concurrent.futures.wait(futures, 30)
        assert not left
        for future in done:
            counts["cancelled" if future.cancelled() else "done"] += 1
            if not future.cancelled():
                logits = future.result()["logits"]
                if engine != "null":
                    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-5)
    assert counts["done"]


def _forked(work: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_call_of_the_parent_fails_in_a_child_at_once() -> None:
    threads = Paused()
    future = threads.submit(lambda: {"ran": True})
    assert threads.taken.wait(30)

    def child() -> int:
        try:
            future.result(5)
        except xrt.EngineError as error:
            return 0 if "before the process was forked" in str(error) else 1
        except TimeoutError:
            return 2
        return 3

    assert _forked(child) == 0
    threads.go.set()
    assert future.result(30) == {"ran": True}


def interrupted(future: InterruptibleFuture[int], instruction: int) -> bool:
    """Wait for a future, interrupted at an instruction of what waits; whether there were so many."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == instruction:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        future.result(0.001)
    except (KeyboardInterrupt, TimeoutError, concurrent.futures.TimeoutError) as error:
        return isinstance(error, KeyboardInterrupt)
    finally:
        sys.settrace(None)
    return False


def test_an_interruption_of_who_waits_keeps_no_lock_of_the_thread_that_runs() -> None:
    for instruction in range(1, 2000):
        future: InterruptibleFuture[int] = InterruptibleFuture()
        more = interrupted(future, instruction)
        thread = threading.Thread(target=future.set_result, args=(instruction,), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), instruction
        assert future.result(30) == instruction
        if not more:
            break
    assert 50 < instruction < 2000
