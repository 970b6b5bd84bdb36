# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`run_async`, as the engines' own requests and as threads of a model: answers, errors, cancelling, closing."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import FaultyEngine, Gate

import xpuruntime as xrt
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("openvino")

WAIT = 60


@pytest.fixture(params=["onnxruntime", "openvino"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Return a model that takes some milliseconds."""
    return models.save(models.mlp(width=1024, batch="N"), tmp_path)


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    return models.save(models.mlp(), tmp_path)


def x_of(value: float, rows: int = 4, width: int = 64) -> np.ndarray:
    return np.full((rows, width), value, np.float32)


def test_many_in_flight_get_their_own_answers(quick: Path, engine: str) -> None:
    with xrt.InferenceSession(quick, device="cpu", engine=engine) as session:
        inputs = [x_of(i, rows=1 + i % 5) for i in range(300)]
        futures = [session.run_async({"x": x}) for x in inputs]
        for x, future in zip(inputs, futures, strict=True):
            np.testing.assert_array_equal(future.result(WAIT)["y"], session.run({"x": x})["y"])


@pytest.mark.parametrize("bad", [{"x": np.zeros((1, 63), np.float32)}, {"xx": x_of(1)}, {"x": [1.0]}])
def test_wrong_inputs_reach_the_caller(quick: Path, engine: str, bad: dict) -> None:
    with xrt.InferenceSession(quick, device="cpu", engine=engine) as session:
        with pytest.raises(xrt.InputError, match=r"input 'x|no input 'xx'"):
            session.run_async(bad).result(WAIT)
        assert session.run_async({"x": x_of(1)}).result(WAIT)["y"].shape == (4, 64)


def test_a_waiting_run_can_be_cancelled(slow: Path, engine: str) -> None:
    with xrt.InferenceSession(slow, device="cpu", engine=engine) as session:
        x = x_of(1, rows=256, width=1024)
        futures = [session.run_async({"x": x}) for _ in range(30)]
        assert futures[-1].cancel()
        assert futures[-1].cancelled()
        for future in futures[:-1]:
            assert future.result(WAIT)["y"].shape == (256, 1024)
        assert not futures[0].cancel()


def test_close_cancels_what_waits_and_finishes_what_runs(slow: Path, engine: str) -> None:
    session = xrt.InferenceSession(slow, device="cpu", engine=engine)
    x = x_of(1, rows=256, width=1024)
    want = session.run({"x": x})["y"]
    futures = [session.run_async({"x": x}) for _ in range(40)]
    session.close()
    done, left = concurrent.futures.wait(futures, WAIT)
    assert not left
    assert any(future.cancelled() for future in done)
    for future in futures:
        if not future.cancelled() and future.exception() is None:
            np.testing.assert_array_equal(future.result()["y"], want)
        elif not future.cancelled():
            assert "closed" in str(future.exception())
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        session.run_async({"x": x})


def test_a_callback_may_start_the_next_run(quick: Path, engine: str) -> None:
    with xrt.InferenceSession(quick, device="cpu", engine=engine) as session:
        done: list[int] = []
        ended = threading.Event()

        def again(_: object) -> None:
            done.append(1)
            if len(done) < 20:
                session.run_async({"x": x_of(len(done))}).add_done_callback(again)
            else:
                ended.set()

        session.run_async({"x": x_of(0)}).add_done_callback(again)
        assert ended.wait(WAIT)


def test_the_model_is_freed_without_the_collector(quick: Path, engine: str) -> None:
    session = xrt.InferenceSession(quick, device="cpu", engine=engine)
    session.run_async({"x": x_of(1)}).result(WAIT)
    loaded = weakref.ref(session._open())
    gc.disable()
    try:
        del session
        deadline = time.monotonic() + 120
        while loaded() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loaded() is None
    finally:
        gc.enable()


def test_the_waiting_thread_ends_by_itself(quick: Path) -> None:
    with xrt.InferenceSession(quick, device="cpu", engine="openvino") as session:
        session.run_async({"x": x_of(1)}).result(WAIT)
        deadline = time.monotonic() + 120
        while any(t.name == "xpuruntime-openvino" for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(t.name == "xpuruntime-openvino" for t in threading.enumerate())
        assert session.run_async({"x": x_of(1)}).result(WAIT)["y"].shape == (4, 64)


@pytest.fixture
def held(quick: Path) -> Iterator[tuple[xrt.InferenceSession, Gate, list[concurrent.futures.Future]]]:
    """Return a session whose runs wait at a gate, and ten of them: as many as run side by side, others waiting."""
    gate = Gate()
    with xrt.InferenceSession(quick, device="cpu", registry=FaultyEngine(gate).registry()) as session:
        futures = [session.run_async({"x": x_of(i)}) for i in range(10)]
        assert gate.come.wait(WAIT)
        yield session, gate, futures
        gate.open.set()


def test_a_full_queue_refuses_and_says_so(held: Any) -> None:
    session, gate, futures = held
    with pytest.raises(xrt.QueueFullError, match=r"2 asynchronous runs of this session wait already\. Fix:"):
        session.run_async({"x": x_of(1)}, queue=2)
    more = session.run_async({"x": x_of(1)}, queue=20)
    gate.open.set()
    for future in (*futures, more):
        assert future.result(WAIT)["y"].shape == (4, 64)


def test_cancelled_runs_make_room(held: Any) -> None:
    session, gate, futures = held
    cancelled = [future for future in futures if future.cancel()]
    assert cancelled
    more = session.run_async({"x": x_of(1)}, queue=1)
    gate.open.set()
    assert more.result(WAIT)["y"].shape == (4, 64)
    done, left = concurrent.futures.wait(futures, WAIT)
    assert not left
    assert sum(future.cancelled() for future in done) == len(cancelled)


def test_a_run_that_does_not_begin_in_time_does_not_run(held: Any) -> None:
    session, gate, futures = held
    late = session.run_async({"x": x_of(1)}, timeout=0.01)
    in_time = session.run_async({"x": x_of(1)}, timeout=WAIT)
    with pytest.raises(TimeoutError, match="did not begin within its timeout") as caught:
        late.result(WAIT)
    assert isinstance(caught.value, xrt.DeadlineError)
    assert not any(future.done() for future in futures), "the others are still on the way"
    gate.open.set()
    for future in (*futures, in_time):
        assert future.result(WAIT)["y"].shape == (4, 64)


@pytest.mark.parametrize("bad", [{"queue": 0}, {"queue": True}, {"queue": 1.5}, {"timeout": 0}, {"timeout": "1"}])
def test_wrong_limits(quick: Path, bad: dict) -> None:
    with xrt.InferenceSession(quick, device="cpu") as session, pytest.raises(xrt.InputError, match=next(iter(bad))):
        session.run_async({"x": x_of(1)}, **bad)


def test_a_timeout_keeps_no_model_alive(quick: Path) -> None:
    session = xrt.InferenceSession(quick, device="cpu", engine="onnxruntime")
    session.run_async({"x": x_of(1)}, timeout=3600).result(WAIT)
    loaded = weakref.ref(session._open())
    session.close()
    del session
    deadline = time.monotonic() + 120
    while loaded() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loaded() is None
    deadline = time.monotonic() + 120
    while any(one.name == "xpuruntime-run-timer" for one in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(one.name == "xpuruntime-run-timer" for one in threading.enumerate())


@pytest.fixture(params=["onnxruntime", "openvino", "null", "torch", "static batch"])
def opened(request: pytest.FixtureRequest, quick: Path) -> Iterator[xrt.InferenceSession]:
    """Return a session on each engine that runs here, with an input ``x``, and one that pads."""
    options: dict[str, Any] = {"device": "cpu"}
    model: Any = quick
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        model, options["example_inputs"] = torch.nn.Linear(64, 64).eval(), {"input": torch.ones(4, 64)}
    elif request.param == "static batch":
        options = {"policy": {"execution": {"engine": "onnxruntime", "device": "cpu", "static_batch": 8}}}
    else:
        options["engine"] = request.param
    with xrt.InferenceSession(model, **options) as session:
        yield session


def test_queue_deadline_and_cancel_on_each_engine(opened: xrt.InferenceSession) -> None:
    """With the model's threads held up by other work, so that nothing begins."""
    feeds = {opened.inputs[0].name: x_of(1)}
    want = opened.run(feeds)
    threads, gate = opened._open().run_threads(1), threading.Event()
    busy = threads.submit(lambda: {"went": gate.wait(WAIT)})
    while not busy.running():
        time.sleep(0.001)
    try:
        waiting = opened.run_async(feeds, queue=1)
        with pytest.raises(xrt.QueueFullError, match="1 asynchronous runs of this session wait already"):
            opened.run_async(feeds, queue=1)
        assert waiting.cancel()
        again = opened.run_async(feeds, queue=1, timeout=WAIT)
        late = opened.run_async(feeds, timeout=0.01)
        with pytest.raises(xrt.DeadlineError, match="did not begin within its timeout"):
            late.result(WAIT)
        assert not again.done()
    finally:
        gate.set()
    for name, array in again.result(WAIT).items():
        np.testing.assert_array_equal(array, want[name])
    assert busy.result(WAIT) == {"went": True}
