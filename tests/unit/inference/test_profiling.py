# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xrt.profile`: what a program sees of its own ranges, runs and operations, on a machine without a device, too."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import linecache
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.engines import observation
from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.inference import profiling
from xpuruntime.runtime import profiler as trace_events
from xpuruntime.runtime import session_registry
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

X = {"x": np.ones((2, 64), np.float32)}


@pytest.fixture(autouse=True)
def _everything_is_given_back() -> Iterator[None]:
    yield
    assert not _core.profiler_active()
    assert trace_events._watching is None
    assert session_registry._open_hook is None
    assert profiling._going_on is None


@pytest.fixture
def session(tmp_path: Path) -> Iterator[xrt.InferenceSession]:
    path = models.save(models.mlp(), tmp_path, "net.onnx")
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as opened:
        yield opened


def test_ranges_runs_and_operations_are_in_one_profile(session: xrt.InferenceSession) -> None:
    with xrt.profile() as prof, prof.range("step"):
        session.run(X)
        with prof.range("after"):
            xrt.ops.matmul(np.ones((4, 5), np.float32), np.ones((5, 6), np.float32))
    by_name = {range_.name.split(" on ")[0]: range_ for range_ in prof.result.ranges}
    step, run, after = by_name["step"], by_name["net.onnx"], by_name["after"]
    [product] = [range_ for range_ in prof.result.ranges if range_.category == "kernel"]
    assert product.name.startswith("matmul ")
    assert product.name.split(" ")[1] in {decision.kernel for decision in xrt.decisions()}
    assert (step.parent, run.parent, after.parent, product.parent) == (0, step.id, step.id, after.id)
    assert (step.category, run.category) == ("range", "run")
    assert prof.result.duration_us >= (step.end_ns - step.start_ns) / 1000
    assert str(prof) == str(prof.result)
    assert "net.onnx on onnxruntime@cpu" in str(prof)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_in_the_block_ends_it(
    tmp_path: Path, session: xrt.InferenceSession, error: type[BaseException]
) -> None:
    before = session.run
    prof = xrt.profile(tmp_path / "t.json")

    def work() -> None:
        with prof:
            session.run(X)
            raise error

    with pytest.raises(error):
        work()
    assert session.run is before
    assert len(prof.result.ranges) == 1
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    with xrt.profile() as again:
        session.run(X)
    assert len(again.result.ranges) == 1


def test_ctrl_c_in_the_block_ends_it(session: xrt.InferenceSession) -> None:
    before = session.run
    with pytest.raises(KeyboardInterrupt), xrt.profile() as prof, prof.range("long"):
        signal.raise_signal(signal.SIGINT)
    assert session.run is before
    assert [(range_.name, range_.finished) for range_ in prof.result.ranges] == [("long", True)]


def test_a_second_profile_is_refused_with_its_reason(session: xrt.InferenceSession) -> None:
    with xrt.profile() as prof:
        with pytest.raises(InputError, match=r"a profile goes on already.*leave its with block first"):
            xrt.profile().__enter__()
        session.run(X)
    assert len(prof.result.ranges) == 1


def test_where_the_core_records_already_it_is_refused_and_nothing_is_left(session: xrt.InferenceSession) -> None:
    from xpuruntime.runtime import profiler

    before = session.run
    profiler.start(devices=False)
    try:
        with pytest.raises(InputError, match="a recording goes on already"):
            xrt.profile().__enter__()
        assert session.run is before
    finally:
        profiler.stop()


def test_a_profile_that_cannot_begin_leaves_nothing(
    session: xrt.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = session.run
    monkeypatch.setattr(profiling.InstrumentedRuns, "start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        xrt.profile().__enter__()
    monkeypatch.undo()
    assert session.run is before
    with xrt.profile() as prof:
        session.run(X)
    assert len(prof.result.ranges) == 1


def test_a_result_that_is_not_there_yet_is_refused() -> None:
    prof = xrt.profile()
    with pytest.raises(InputError, match="no result yet"):
        prof.result  # noqa: B018
    with prof:
        with pytest.raises(InputError, match="leave its with block first"):
            prof.result  # noqa: B018
        assert "profile" in str(prof)
    assert prof.result.ranges == ()


@pytest.mark.parametrize("limit", [0, -1, 1.5, "5", True, None])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(InputError, match="limit must be a whole number of at least 1"):
        xrt.profile(limit=limit)


def test_beyond_the_limit_records_are_counted(session: xrt.InferenceSession) -> None:
    with xrt.profile(limit=3) as prof:
        for _ in range(10):
            session.run(X)
    assert len(prof.result.ranges) == 3
    assert prof.result.dropped == 7
    [note] = [note for note in prof.result.notes if "lost" in note]
    assert note.startswith("7 records are lost")
    assert note in str(prof).replace("\n", " ")


@pytest.mark.parametrize(("name", "words"), [("t.txt", "end it so"), ("no/t.json", "No such"), (".", "end it so")])
def test_a_trace_that_cannot_be_written_is_refused_before_the_block(
    tmp_path: Path, session: xrt.InferenceSession, name: str, words: str
) -> None:
    before, ran = session.run, []
    with pytest.raises(InputError, match=words), xrt.profile(tmp_path / name):
        ran.append(name)
    assert not ran
    assert session.run is before


def test_a_trace_that_cannot_be_written_afterwards_raises(tmp_path: Path, session: xrt.InferenceSession) -> None:
    (tmp_path / "folder").mkdir()
    before = session.run
    prof = xrt.profile(tmp_path / "folder" / "t.json")

    def work() -> None:
        with prof:
            (tmp_path / "folder").rmdir()
            session.run(X)

    with pytest.raises(InputError, match="cannot write the trace"):
        work()
    assert session.run is before
    assert len(prof.result.ranges) == 1  # the result is there all the same


def test_an_error_in_the_block_is_the_one_heard(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    def work() -> None:
        with xrt.profile(tmp_path / "folder" / "t.json"):
            (tmp_path / "folder").rmdir()
            raise ZeroDivisionError

    with (
        pytest.warns(XpuRuntimeWarning, match="the block failed, and so did its profile: cannot write"),
        pytest.raises(ZeroDivisionError),
    ):
        work()


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_trace_has_what_the_result_has(tmp_path: Path, session: xrt.InferenceSession, name: str) -> None:
    with xrt.profile(tmp_path / name) as prof, prof.range("all"):
        session.run(X)
    data = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    drawn = [traceevent for traceevent in trace["traceEvents"] if traceevent["ph"] == "X"]
    assert [one["name"] for one in drawn] == [range_.name for range_ in prof.result.ranges]
    assert all(one["dur"] >= 0 and {"pid", "tid", "ts"} <= set(one) for one in drawn)
    assert trace["metadata"]["source"] == prof.result.source
    assert trace["metadata"]["notes"] == list(prof.result.notes)


def test_explain_inside_puts_the_nodes_of_onnxruntime_into_the_trace(
    tmp_path: Path, session: xrt.InferenceSession
) -> None:
    with xrt.profile(tmp_path / "t.json") as prof:
        report = session.explain(X, runs=3)
    nodes = [mark for mark in prof.result.marks if mark.track == "nodes of ONNX Runtime"]
    assert {node.name for node in nodes} == {unit.id for unit in report.units if unit.time is not None}
    counts = {name: sum(node.name == name for node in nodes) for name in {node.name for node in nodes}}
    assert set(counts.values()) == {3}  # the counted runs, without the cold one
    recording = prof.result._recording
    for node in nodes:
        assert recording.start_ns <= node.start_ns <= node.end_ns <= recording.end_ns
        assert node.details["provider"] == "CPUExecutionProvider"
    assert not any("laid end to end" in mark.track for mark in prof.result.marks)
    trace = json.loads((tmp_path / "t.json").read_text())
    assert sum(traceevent.get("cat") == "nodes of ONNX Runtime" for traceevent in trace["traceEvents"]) == len(nodes)
    assert any(range_.category == "run" for range_ in prof.result.ranges)  # those by which it measures


def test_explain_inside_lays_units_of_other_engines_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    path = models.save(models.mlp(1024), tmp_path, "net.onnx")  # OpenVINO counts in whole microseconds
    with (
        xrt.InferenceSession(path, device="cpu", engine="openvino") as session,
        xrt.profile(tmp_path / "t.json") as prof,
    ):
        report = session.explain({"x": np.ones((4, 1024), np.float32)}, runs=3)
    laid = [mark for mark in prof.result.marks if mark.track == "units of openvino, one run, laid end to end"]
    timed = [unit for unit in report.units if unit.time is not None and unit.time.unit == "us" and unit.time.value]
    assert laid
    assert [one.name for one in laid] == [unit.id for unit in timed]
    assert all(after.start_ns == before.end_ns for before, after in itertools.pairwise(laid))
    assert laid[0].start_ns >= prof.result._recording.start_ns
    assert [round((one.end_ns - one.start_ns) / 1000, 2) for one in laid] == pytest.approx(
        [unit.time.value for unit in timed if unit.time is not None], abs=0.01
    )


def test_profile_of_a_program_without_arrays_and_sessions(tmp_path: Path) -> None:
    """What stands in the guide, and nothing of PyTorch is imported for it."""
    code = (
        "import sys, xpuruntime as xrt\n"
        "with xrt.profile(sys.argv[1]) as prof:\n"
        "    with prof.range('load'): pass\n"
        "assert 'torch' not in sys.modules\n"
        "print(prof)\n"
    )
    target = tmp_path / "t.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "load" in done.stdout
    assert any(traceevent["name"] == "load" for traceevent in json.loads(target.read_text())["traceEvents"])


def test_an_exception_at_any_line_of_a_profile_leaves_none_open(session: xrt.InferenceSession) -> None:
    """As the handler of any signal raises one: of a time limit, or of the end of a server."""
    files = {profiling.__file__, observation.__file__, trace_events.__file__}
    left = -1

    def at_line(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if name not in files:
            return None
        # Between the end of a with block and its exit, where tracing stops and no signal is handled, a lock stays.
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
            if left == 0:
                raise TimeoutError
        return at_line

    for steps in range(1, 400):
        left = steps
        sys.settrace(at_line)
        try:
            with contextlib.suppress(TimeoutError), xrt.profile():
                pass
        finally:
            sys.settrace(None)
        with xrt.profile() as again:
            session.run(X)
        assert [range_.category for range_ in again.result.ranges] == ["run"], steps
        if left > 0:
            break
    assert 20 < steps < 399, "every line was interrupted once"
