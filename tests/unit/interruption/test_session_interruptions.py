# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ctrl-C ends a call of a session, a profile or an operation; the next request is answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from interrupting import press, press_when

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.engines.onnxruntime.observing.profile import Devices
from xpuruntime.engines.run_threads import RunThreads
from xpuruntime.inference import profiling
from xpuruntime.ops import call_context
from xpuruntime.runtime import profiler as trace_events
from xpuruntime.runtime import session_registry
from xpuruntime.runtime import session_registry as instrumented_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An interruption inside of a destructor is lost: Python writes it to stderr, and pytest warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
IMAGE = np.random.default_rng(7).random((8, 1, 8, 8), np.float32)
FEEDS = {"image": IMAGE}
ENGINES = ["onnxruntime", pytest.param("openvino", marks=pytest.mark.needs_module("openvino"))]


@pytest.fixture(scope="module")
def want() -> np.ndarray[Any, Any]:
    raw = onnxruntime.InferenceSession(str(xrt.demo_model_path()), providers=["CPUExecutionProvider"])
    answer: np.ndarray[Any, Any] = raw.run(["logits"], FEEDS)[0]
    return answer


@pytest.fixture(params=ENGINES)
def session(request: pytest.FixtureRequest) -> Iterator[xrt.InferenceSession]:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=request.param) as opened:
        yield opened


def _nothing_is_left() -> None:
    assert profiling._going_on is None
    assert not _core.profiler_active()
    assert trace_events._watching is None
    assert session_registry._open_hook is None
    assert instrumented_calls._watching is None
    assert call_context.ambient.get() is None


def _good(session: xrt.InferenceSession, want: np.ndarray[Any, Any]) -> Callable[[], None]:
    def check() -> None:
        _nothing_is_left()
        np.testing.assert_allclose(session.run(FEEDS)["logits"], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(session.run_async(FEEDS).result(30)["logits"], want, rtol=1e-4, atol=1e-5)

    return check


def test_callbacks_that_raise_and_cancelled_waits_leave_the_queue(want: np.ndarray[Any, Any]) -> None:
    def fail(_: Any) -> None:
        raise ValueError("a callback that fails")

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.sleep(30)), 0.001)
        answer = await asyncio.wrap_future(session.run_async(FEEDS))
        np.testing.assert_allclose(answer["logits"], want, rtol=1e-4, atol=1e-5)

    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        future = session.run_async(FEEDS)
        future.add_done_callback(fail)
        future.result(30)
        asyncio.run(wait())
        _good(session, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_closing_while_requests_run(engine: str, want: np.ndarray[Any, Any]) -> None:
    session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=engine)
    futures = [session.run_async(FEEDS) for _ in range(200)]
    session.close()
    done, open_ = concurrent.futures.wait(futures, 30)
    assert not open_
    for one in done:
        if not one.cancelled():
            np.testing.assert_allclose(one.result()["logits"], want, rtol=1e-4, atol=1e-5)
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        session.run_async(FEEDS)


def _good(session: xrt.InferenceSession, want: np.ndarray[Any, Any]) -> None:
    _nothing_is_left()
    np.testing.assert_allclose(session.run(FEEDS)["logits"], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(session.run_async(FEEDS).result(30)["logits"], want, rtol=1e-4, atol=1e-5)


def test_ctrl_c_in_blocks_that_record_and_choose(session: xrt.InferenceSession, want: np.ndarray[Any, Any]) -> None:
    for block in (xrt.profile(), xrt.use_policy(xrt.KernelPolicy(matmul="cpu.reference")), Devices("cuda:0")):
        with pytest.raises(KeyboardInterrupt), block:  # noqa: PT012
            session.run(FEEDS)
            press()
        _good(session, want)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signal to a thread")
def test_ctrl_c_ends_the_wait_for_a_run_and_for_close() -> None:
    threads, go = RunThreads(1), threading.Event()

    def work() -> dict[str, Any]:
        go.wait(60)
        return {"ran": True}

    future, waits = threads.submit(work), threading.Event()
    thread = press_when(waits.is_set)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        waits.set()
        future.result()
    thread.join()
    thread = press_when(lambda: threads.closed)
    with pytest.raises(KeyboardInterrupt):
        threads.close()
    thread.join()
    go.set()
    assert future.result(30) == {"ran": True}
    threads.close()
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        threads.submit(work)
