# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions of sessions, profiles and operations leave them as they were; the next request is answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from interrupting import WAYS, sweep

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.engines.onnxruntime.observing.devices import Devices
from xpuruntime.files.reading import open_regular
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


@pytest.mark.parametrize("way", WAYS)
def test_run_and_run_async(session: xrt.InferenceSession, want: np.ndarray[Any, Any], way: str) -> None:
    def work() -> None:
        futures = [session.run_async(FEEDS) for _ in range(6)]
        session.run(FEEDS)
        for future in futures:
            future.result()

    sweep(way, work, _good(session, want), 500)


# Of the standard library's folders and iterators that were interrupted: Python ends them by itself.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", WAYS)
def test_explain(session: xrt.InferenceSession, want: np.ndarray[Any, Any], way: str) -> None:
    sweep(way, lambda: session.explain(FEEDS, runs=1), _good(session, want), 15)


@pytest.mark.parametrize("way", WAYS)
def test_bind(session: xrt.InferenceSession, want: np.ndarray[Any, Any], way: str) -> None:
    def work() -> None:
        session.bind(FEEDS).run()

    sweep(way, work, _good(session, want), 60)


@pytest.mark.parametrize("way", WAYS)
def test_profile(want: np.ndarray[Any, Any], way: str) -> None:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:

        def work() -> None:
            with xrt.profile() as prof, prof.range("block"):
                session.run(FEEDS)

        sweep(way, work, _good(session, want), 500)
        with xrt.profile() as prof:
            session.run(FEEDS)
    assert [one.category for one in prof.result.ranges] == ["run"]


@pytest.mark.parametrize("way", WAYS)
def test_opening_and_closing(want: np.ndarray[Any, Any], way: str) -> None:
    def work() -> None:
        with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
            session.run_async(FEEDS)

    sweep(way, work, _nothing_is_left, 25)
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        _good(session, want)()


@pytest.mark.parametrize("way", WAYS)
def test_opening_a_file_closes_its_descriptor_once(way: str) -> None:
    def work() -> None:
        open_regular(xrt.demo_model_path()).close()

    # A second close would raise EBADF in place of the interruption, or close a file of another thread.
    sweep(way, work, lambda: None, 500)


@pytest.mark.parametrize("way", WAYS)
def test_operations_under_a_policy(way: str) -> None:
    a = np.random.default_rng(3).random((6, 5), np.float32)
    policy = xrt.KernelPolicy(matmul="cpu.reference")

    def work() -> None:
        for _ in range(5):
            with xrt.use_policy(policy):
                xrt.ops.matmul(a, a.T)

    def check() -> None:
        _nothing_is_left()
        np.testing.assert_allclose(xrt.ops.matmul(a, a.T), a.astype(np.float64) @ a.T, rtol=1e-5)

    sweep(way, work, check, 500)


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
        _good(session, want)()


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


def test_use_policy_of_tasks_and_generators() -> None:
    def kernel() -> str:
        return str(call_context.current_policy().kernels.matmul)

    async def work(word: str, turns: int) -> None:
        with xrt.use_policy(xrt.KernelPolicy(matmul=word)):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert kernel() == word

    async def main() -> None:
        await asyncio.gather(work("cpu.blas", 1), work("cpu.reference", 5), work("auto", 3))

    asyncio.run(main())
    first, second = (xrt.use_policy(xrt.KernelPolicy(matmul=word)) for word in ("cpu.blas", "cpu.reference"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kernel() == "cpu.reference"
    second.__exit__(None, None, None)
    _nothing_is_left()


@pytest.mark.parametrize("way", WAYS)
def test_what_watches_devices(way: str) -> None:
    """`explain` of a CUDA session records what devices do; here the ranges of the host."""

    def work() -> None:
        with Devices("cuda:0"):
            sum(range(100))

    def check() -> None:
        assert not _core.profiler_active()

    assert sweep(way, work, check) > 0
