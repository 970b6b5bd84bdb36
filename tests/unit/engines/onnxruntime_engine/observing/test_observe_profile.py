# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reading ONNX Runtime's profile: whole, cut off, foreign, and what it has outside of nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from observe_models import conv_net, feeds, maker

from xpuruntime.engines.onnxruntime.observing.kernels import outside
from xpuruntime.engines.onnxruntime.observing.profile import NodeSpan, read_profile
from xpuruntime.errors import EngineError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A profile of one cold and four more runs."""
    proto = conv_net()
    session = maker(proto)(str(tmp_path_factory.mktemp("profile") / "p"), None)
    for _ in range(5):
        session.run(None, feeds(proto))
    return session.end_profiling()


def event(name, ts, dur, op="Add", cat="Node", index=0, provider="CPUExecutionProvider", tid=1, **more):
    """One event in ONNX Runtime's form, made by hand."""
    args = {"op_name": op, "provider": provider, "node_index": str(index), **more} if cat == "Node" else {}
    full = f"{name}_kernel_time" if cat == "Node" else name
    return {"cat": cat, "pid": 1, "tid": tid, "dur": dur, "ts": ts, "ph": "X", "name": full, "args": args}


def write(path, events):
    path.write_text("[\n" + ",\n".join(json.dumps(e) for e in events) + "\n]\n")
    return path


def test_a_real_profile(written):
    profile = read_profile(written)
    assert not profile.partial
    assert profile.notes == ()
    assert len(profile.run_us) == 4
    first = profile.events[0]
    assert (first.name, first.op, first.provider) == ("c1_r_nchwc", "Conv", "CPUExecutionProvider")
    assert (first.inputs[0].dtype, first.inputs[0].shape) == ("float", (1, 3, 16, 16))
    assert first.inputs[0].elements == 768
    assert first.output_bytes == 16 * 16 * 16 * 4
    assert {e.runs for e in profile} == {4}
    assert [e.order for e in profile] == list(range(6))


def test_the_cold_run_is_left_out_and_the_median_taken(tmp_path):
    events = []
    for number, took in enumerate((9000, 10, 30, 20)):
        start = number * 10_000
        events += [event("a", start + 1, took), event("model_run", start, took + 5, cat="Session")]
    profile = read_profile(write(tmp_path / "p.json", events))
    assert profile.events[0].time_us == 20
    assert profile.run_us == (15, 35, 25)


def test_the_only_run_is_kept_and_said_to_be_cold(tmp_path):
    events = [event("a", 1, 7), event("model_run", 0, 9, cat="Session")]
    profile = read_profile(write(tmp_path / "p.json", events))
    assert profile.events[0].time_us == 7
    assert "cold" in profile.notes[0]


def test_a_loop_does_not_count_its_body_twice(tmp_path):
    run = [
        event("body", 110, 10),
        event("inner_if", 125, 30, op="If"),
        event("deep", 130, 20),
        event("body", 160, 10),
        event("loop", 100, 100, op="Loop"),
        event("model_run", 90, 120, cat="Session"),
    ]
    again = [{**e, "ts": e["ts"] + 1000} for e in run]
    times = {e.name: (e.time_us, e.calls) for e in read_profile(write(tmp_path / "p.json", run + again))}
    assert times == {"loop": (50, 1), "body": (20, 2), "inner_if": (10, 1), "deep": (20, 1)}


def test_equal_names_are_told_apart_by_index(tmp_path):
    run = [event("n", 1, 2, index=1), event("n", 4, 3, index=2), event("model_run", 0, 9, cat="Session")]
    again = [{**e, "ts": e["ts"] + 100} for e in run]
    assert [(e.index, e.time_us) for e in read_profile(write(tmp_path / "p.json", run + again))] == [(1, 2), (2, 3)]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_a_cut_off_profile_is_salvaged(written, tmp_path, share):
    text = Path(written).read_text()
    path = tmp_path / "cut.json"
    path.write_text(text[: int(len(text) * share)])
    profile = read_profile(path)
    assert profile.partial
    assert any("cut off" in note for note in profile.notes)
    names = {e.name for e in read_profile(written)}
    assert {e.name for e in profile.events} <= names
    if share > 0.5:
        assert {e.name for e in profile.events} == names


def test_an_unfinished_last_run_is_left_out(tmp_path):
    events = [event("a", 1, 7), event("model_run", 0, 9, cat="Session")]
    events += [event("a", 101, 8), event("model_run", 100, 9, cat="Session"), event("a", 201, 999)]
    profile = read_profile(write(tmp_path / "p.json", events))
    assert profile.events[0].time_us == 8
    assert profile.partial
    assert "did not finish" in profile.notes[0]


@pytest.mark.parametrize("text", ["", "[", "[]", "[\n", '[\n{"cat": "Ses'])
def test_a_profile_without_events(tmp_path, text):
    path = tmp_path / "empty.json"
    path.write_text(text)
    profile = read_profile(path)
    assert profile.partial
    assert profile.events == ()
    assert profile.notes


@pytest.mark.parametrize(
    "text",
    ['{"traceEvents": []}', "hello", "[1, 2, 3]", '[{"a": 1}]', "\x00\x01\x02", '[{"cat": "x", "name": "y"}, 5]'],
)
def test_a_foreign_file_is_refused(tmp_path, text):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(EngineError, match="is not a profile of ONNX Runtime"):
        read_profile(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(EngineError, match="cannot read the profile"):
        read_profile(tmp_path / "nowhere.json")


def test_odd_arguments_do_not_hurt(tmp_path):
    odd = event("a", 1, 7, node_index="x", output_size=None, input_type_shape=[{"float": "?"}, 3])
    events = [odd, event("model_run", 0, 9, cat="Session")]
    seen = read_profile(write(tmp_path / "p.json", events)).events[0]
    assert (seen.index, seen.output_bytes, seen.inputs[0].shape) == (-1, 0, ())


def span(start: float, end: float, thread: int = 1) -> NodeSpan:
    return NodeSpan("n", 0, "Add", start, end, thread, "CPUExecutionProvider")


def test_before_between_and_after() -> None:
    assert outside([(0, 100)], [span(5, 40), span(50, 90)]) == {"call": 15.0, "between": 10.0}


def test_nodes_at_the_same_time_count_once() -> None:
    nested = [span(10, 60), span(20, 30), span(40, 80, thread=2), span(85, 90)]
    assert outside([(0, 100)], nested) == {"call": 20.0, "between": 5.0}


def test_the_median_of_the_runs() -> None:
    runs = [(0, 100), (1000, 1100), (2000, 2900)]
    spans = [span(s + 2, s + 50) for s, _ in runs] + [span(s + 53, e - 1) for s, e in runs]
    assert outside(runs, spans) == {"call": 3.0, "between": 3.0}
    assert outside([*runs, (3000, 3100)], spans) == {"call": 3.0, "between": 3.0}, "a run without nodes says nothing"
