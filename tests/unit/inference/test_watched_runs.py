# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Runs in a profile: those of sessions and bindings, opened before or inside, and everything is put back."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.inference.profiling import InstrumentedRuns
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

WAIT = 60
X = {"x": np.ones((2, 64), np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return models.save(models.mlp(), tmp_path, "net.onnx")


def opened(path: Path, engine: str = "onnxruntime") -> xrt.InferenceSession:
    return xrt.InferenceSession(path, device="cpu", engine=engine)


def runs(prof: xrt.profile) -> list[str]:
    return [range_.name for range_ in prof.result.ranges if range_.category == "run"]


@pytest.mark.parametrize("engine", ["onnxruntime", "null", "openvino", "torch"])
def test_runs_of_an_open_session_are_seen_and_its_run_is_the_same_afterwards(
    tmp_path: Path, path: Path, engine: str
) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    if engine == "torch":
        torch = pytest.importorskip("torch")
        session = xrt.InferenceSession(
            torch.nn.Linear(64, 4).eval(), device="cpu", engine="torch", example_inputs=[torch.ones(2, 64)]
        )
        feeds: dict[str, Any] = {session.inputs[0].name: X["x"]}
    else:
        session, feeds = opened(path, engine), X
    with session:
        want = session.run(feeds)
        before = session.run
        with xrt.profile() as prof:
            assert session.run is not before
            for _ in range(3):
                got = session.run(feeds)
        assert session.run is before
        name = next(iter(want))
        np.testing.assert_array_equal(got[name], want[name])
        session.run(feeds)
    assert len(runs(prof)) == 3
    assert all(f" on {engine}@cpu" in run for run in runs(prof))


def test_a_model_is_left_as_python_reads_it_fastest(path: Path) -> None:
    with opened(path) as session:
        binding = session.bind(X)
        session.run_async(X).result(WAIT)
        owners = (session, session._loaded, binding)
        # An object whose attributes were added to or listed refers to a dict of them from then on, and is slower.
        before = [[id(referent) for referent in gc.get_referents(owner)] for owner in owners]
        with xrt.profile():
            session.run(X)
            session.run_async(X).result(WAIT)
            binding.run()
        after = [[id(referent) for referent in gc.get_referents(owner)] for owner in owners]
    assert after == before


def test_a_binding_whose_run_is_a_method_is_watched_and_restored(path: Path) -> None:
    class Plugins:
        graph = "off"

        def run(self) -> int:
            return 7

    with opened(path) as session:
        binding, watching = Plugins(), InstrumentedRuns()
        watching.start()
        watching._opened(session, binding)
        assert "run" in vars(binding)
        assert binding.run() == 7
        watching.stop()
        assert "run" not in vars(binding)
        assert binding.run() == 7


def test_a_session_opened_inside_is_watched_and_restored(path: Path) -> None:
    with xrt.profile() as prof:
        session = opened(path)
        inside = session.run
        session.run(X)
    assert session.run is not inside
    session.run(X)
    session.close()
    assert runs(prof) == ["net.onnx on onnxruntime@cpu"]


def test_a_run_that_was_taken_inside_goes_on_working(path: Path) -> None:
    with opened(path) as session:
        with xrt.profile():
            taken = session.run
        np.testing.assert_array_equal(taken(X)["y"], session.run(X)["y"])


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_bindings_are_watched_and_restored(path: Path, engine: str) -> None:
    pytest.importorskip(engine)
    with opened(path, engine) as session:
        early, closed_early = session.bind(X), session.bind(X)
        closed_early.close()
        before = early.run
        with xrt.profile() as prof:
            late = session.bind(X)
            early.run()
            late.run()
            late.close()
        assert early.run is before
        early.run()
        np.testing.assert_array_equal(early.outputs["y"], session.run(X)["y"])
        with pytest.raises(xrt.XpuRuntimeError, match="closed"):
            late.run()
    assert runs(prof) == [f"net.onnx on {engine}@cpu, bound"] * 2


def test_a_session_closed_inside_stays_closed(path: Path) -> None:
    early = opened(path)
    with xrt.profile() as prof:
        late = opened(path)
        early.run(X)
        for session in (early, late):
            session.close()
            with pytest.raises(xrt.XpuRuntimeError, match="closed"):
                session.run(X)
    for session in (early, late):
        with pytest.raises(xrt.XpuRuntimeError, match="closed"):
            session.run(X)
    assert len(runs(prof)) == 1


def test_nothing_is_kept_alive_by_being_watched(path: Path) -> None:
    with xrt.profile() as prof:
        session = opened(path)
        binding = session.bind(X)
        binding.run()
        known = [weakref.ref(session), weakref.ref(session._loaded), weakref.ref(binding)]
        del session, binding
        gc.collect()
        assert [one() for one in known] == [None, None, None]
    assert runs(prof)[-1] == "net.onnx on onnxruntime@cpu, bound"


def test_a_run_that_fails_is_a_range_that_ended(path: Path) -> None:
    with opened(path) as session, xrt.profile() as prof:
        with pytest.raises(xrt.InputError):
            session.run({"x": np.ones((2, 63), np.float32)})
        session.run(X)
    first, second = prof.result.ranges
    assert first.finished
    assert second.parent == 0


def test_asynchronous_runs_of_threads_are_seen(path: Path) -> None:
    with opened(path) as session, xrt.profile() as prof:
        for future in [session.run_async(X) for _ in range(8)]:
            future.result(WAIT)
    ranges = [range_ for range_ in prof.result.ranges if range_.category == "run"]
    assert [span.name for span in ranges] == ["net.onnx on onnxruntime@cpu"] * 8
    assert threading.get_native_id() not in {span.thread for span in ranges}


def test_asynchronous_requests_of_an_engine_are_seen_from_start_to_end(path: Path) -> None:
    pytest.importorskip("openvino")
    with opened(path, "openvino") as session, xrt.profile() as prof:
        for future in [session.run_async(X) for _ in range(8)]:
            future.result(WAIT)
        with pytest.raises(xrt.InputError):
            session.run_async({"wrong": X["x"]}).result(WAIT)
    assert runs(prof) == ["net.onnx on openvino@cpu, handed over"] * 9
    marks = [one for one in prof.result.marks if one.track == "asynchronous runs"]
    # The caller of result() may go on before the mark of the last is told.
    assert 7 <= len(marks) <= 8
    handed = [range_ for range_ in prof.result.ranges if range_.category == "run"]
    assert {one.thread for one in marks} == {one.thread for one in handed}
    for mark in marks:
        assert mark.start_ns <= mark.end_ns
        assert prof.result._recording.start_ns <= mark.start_ns


def test_many_threads_run_and_open_while_profiles_begin_and_end(path: Path) -> None:
    stop, failures = threading.Event(), []

    def work(shared: xrt.InferenceSession) -> None:
        while not stop.is_set():
            try:
                shared.run(X)
                with opened(path, "null") as own:
                    own.run(X)
            except Exception as error:
                failures.append(error)

    with opened(path) as session:
        before = session.run
        threads = [threading.Thread(target=work, args=(session,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            seen = 0
            for _ in range(10):
                with xrt.profile(devices=False) as prof:
                    stop.wait(0.03)
                seen += len(runs(prof))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert session.run is before
        assert seen > 0
