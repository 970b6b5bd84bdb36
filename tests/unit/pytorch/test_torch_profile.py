# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`profile`: PyTorch's profiler, and one trace with our decisions in it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import pytest

from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.runtime.profiler import Mark, mark

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = pytest.mark.torch

OURS = "xpuruntime"


@pytest.fixture(autouse=True)
def _everything_is_given_back():
    from xpuruntime.pytorch.dispatch.context import CONTEXT
    from xpuruntime.pytorch.dispatch.overrides.registry import installed
    from xpuruntime.runtime import profiler as trace_events

    yield
    xt.clear_kernel_policy()
    assert installed() == ()
    assert CONTEXT.observer is None
    assert trace_events._watching is None
    assert not torch._C._autograd._profiler_enabled()


def step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model(torch.randn(4, 8)).square().sum().backward()


def load(path: Any) -> dict[str, Any]:
    data = path.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    return document


def check_trace(document: dict[str, Any]) -> None:
    """Check a document against the Trace Event Format, as Perfetto reads it."""
    open_: dict[tuple[Any, Any], list[str]] = defaultdict(list)
    flows: dict[tuple[Any, Any, Any], list[tuple[str, float]]] = defaultdict(list)
    slices: dict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        kind = event["ph"]
        assert kind in ("X", "M", "i", "s", "f", "t", "B", "E", "C"), event
        assert isinstance(event["pid"], (int, str)), event
        if kind != "C":
            assert isinstance(event["tid"], (int, str)), event
        if kind != "M":
            assert isinstance(event["ts"], (int, float)), event
        if kind == "X":
            assert event["dur"] >= 0, event
            assert event["name"], event
            slices[(event["pid"], event["tid"])].append((event["ts"], event["ts"] + event["dur"]))
        elif kind == "B":
            open_[(event["pid"], event["tid"])].append(event["name"])
        elif kind == "E":
            assert open_[(event["pid"], event["tid"])].pop(), event
        elif kind in "sf":
            flows[(event["cat"], event["name"], event["id"])].append((kind, event["ts"]))
        elif kind == "M":
            assert isinstance(event["args"], dict), event
    assert not any(open_.values())
    for key, ends in flows.items():
        if key[0] == OURS:
            kinds = sorted(kind for kind, _ in ends)
            assert kinds == ["f", "s"], key
            times = dict(ends)
            assert times["s"] <= times["f"], key
    for event in document["traceEvents"]:  # an arrow starts and ends in something that is drawn
        if event["ph"] in "sf" and event.get("cat") == OURS:
            at = event["ts"]
            assert any(a <= at <= b for a, b in slices[(event["pid"], event["tid"])]), event


def of_ours(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event.get("cat") == OURS and event["ph"] == "X"]


def test_it_gives_the_profiler_of_pytorch():
    with xt.profile() as prof:
        step()
    names = {event.key for event in prof.key_averages()}
    assert {"aten::mm", "aten::addmm"} <= names


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_one_trace_has_both_sides_and_is_well_formed(tmp_path, name):
    path = tmp_path / name
    with xt.kernel_policy(matmul="cpu.reference"), xt.profile(path):
        step()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    document = load(path)
    check_trace(document)
    ranges = {event["name"] for event in document["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"xpuruntime matmul cpu.reference 0", "xpuruntime matmul cpu.reference 2"} <= ranges
    decisions = of_ours(document)
    assert {event["args"]["resolved"] for event in decisions} == {"cpu.reference"}
    assert {event["args"]["by"] for event in decisions} == {"kernels.matmul"}
    assert all("chosen: cpu.reference" in event["args"]["decision"] for event in decisions)
    (process,) = {event["pid"] for event in decisions}
    named = [e for e in document["traceEvents"] if e["ph"] == "M" and e["pid"] == process]
    assert {"name": "xpuruntime"} in [e["args"] for e in named if e["name"] == "process_name"]
    arrows = [e for e in document["traceEvents"] if e["ph"] == "f" and e.get("cat") == OURS]
    assert len(arrows) == len(decisions)
    assert document["xpuruntime_policy"]["kernels"] == {"matmul": "cpu.reference"}


def test_clocks_agree(tmp_path):
    path = tmp_path / "trace.json"
    with xt.kernel_policy(matmul="cpu.reference"), xt.profile(path):
        begun = time.time_ns()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        ended = time.time_ns()
    document = load(path)
    (decision,) = of_ours(document)
    (product,) = (e for e in document["traceEvents"] if e.get("name") == "aten::mm")
    base = document["baseTimeNanoseconds"]
    slack = 1000.0  # microseconds: both clocks are the system's, read a moment apart
    assert (begun - base) / 1000 - slack <= decision["ts"] <= (ended - base) / 1000 + slack
    assert product["ts"] - slack <= decision["ts"] <= product["ts"] + product["dur"] + slack


def test_without_a_policy_the_trace_says_so(tmp_path):
    path = tmp_path / "trace.json"
    with xt.profile(path):
        step()
    document = load(path)
    check_trace(document)
    assert document["xpuruntime_policy"] is None
    assert of_ours(document) == []


def test_what_is_marked_stands_on_its_track(tmp_path):
    path = tmp_path / "trace.json"
    with mark("tuning", "before"):
        pass
    with xt.profile(path):
        with mark("tuning", "matmul", candidates=3):
            time.sleep(0.002)
        thread = threading.Thread(target=_marked_elsewhere)
        thread.start()
        thread.join()
    document = load(path)
    check_trace(document)
    marked = {event["name"]: event for event in of_ours(document)}
    assert set(marked) == {"matmul", "run"}
    assert marked["matmul"]["args"] == {"candidates": 3}
    assert marked["matmul"]["dur"] >= 2000
    tracks = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert tracks[marked["matmul"]["tid"]].startswith("tuning")
    assert tracks[marked["run"]["tid"]].startswith("sessions")


def _marked_elsewhere() -> None:
    with mark("sessions", "run"):
        pass


def test_captures_are_drawn_from_the_calls_that_begin_and_end_them(tmp_path):
    from xpuruntime.pytorch.profiling.profile import merge_trace

    raw, target = tmp_path / "raw.json", tmp_path / "out.json"
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 5, "ts": ts, "dur": 2.0, "args": {}}
        for name, ts in (
            ("cudaStreamBeginCapture", 10.0),
            ("cudaLaunchKernel", 15.0),
            ("cudaStreamEndCapture", 30.0),
            ("cudaStreamEndCapture", 40.0),
        )
    ]
    raw.write_text(json.dumps({"baseTimeNanoseconds": 1000, "traceEvents": events}))
    marks = [Mark("tuning", "m", 3000, 5000, 5, {})]
    merge_trace(raw, target, [], [], marks)
    document = load(target)
    check_trace(document)
    found = {event["name"]: (event["ts"], event["dur"]) for event in of_ours(document)}
    assert found == {"capture of a CUDA graph": (10.0, 22.0), "m": (2.0, 2.0)}


@pytest.mark.parametrize("name", ["trace.txt", "trace"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"'\.json' or '\.json\.gz'"):
        xt.profile(tmp_path / name)


def test_a_path_that_cannot_be_written_is_refused_before_the_block(tmp_path):
    ran = []
    for path in (tmp_path / "no" / "folder" / "t.json", tmp_path / "taken.json"):
        if path.name == "taken.json":
            path.mkdir()
        with pytest.raises(InputError, match=str(path)), xt.profile(path):
            ran.append(path)
    assert ran == []


def test_a_full_disk_leaves_the_old_trace_and_names_the_path(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    code = (
        "import resource, signal, sys, torch, xpuruntime.pytorch as xt\n"
        "from xpuruntime.errors import InputError\n"
        "a = torch.ones(2, 2)\n"
        "torch.mm(a, a)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n"
        "    with xt.profile(sys.argv[1]):\n"
        "        [torch.mm(a, a) for _ in range(50)]\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert f"cannot write the trace to '{path}'" in done.stdout
    assert "free space" in done.stdout
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_broken_trace_of_pytorch_is_said(tmp_path):
    from xpuruntime.pytorch.profiling.profile import merge_trace

    raw, target = tmp_path / "raw.json", tmp_path / "out.json"
    raw.write_text('{"traceEvents": [{"ph": "X"')
    with pytest.raises(InputError, match="not whole"):
        merge_trace(raw, target, [], [], [])
    assert not target.exists()


def test_an_error_in_the_block_is_the_one_heard_and_the_trace_is_written(tmp_path):
    path = tmp_path / "trace.json"

    def work() -> None:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), xt.profile(path):
        work()
    document = load(path)
    check_trace(document)
    assert any(event.get("name") == "aten::mm" for event in document["traceEvents"])


def test_an_error_in_the_block_and_one_in_the_trace(tmp_path, monkeypatch):
    from xpuruntime.pytorch.profiling import profile

    def broken(*_: Any) -> None:
        raise InputError("no room")

    monkeypatch.setattr(profile, "merge_trace", broken)
    with (
        pytest.warns(XpuRuntimeWarning, match="no room"),
        pytest.raises(ZeroDivisionError),
        xt.profile(tmp_path / "trace.json"),
    ):
        raise ZeroDivisionError


def test_the_options_of_the_profiler_are_passed_on():
    with xt.profile(record_shapes=False, activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    (product,) = (event for event in prof.events() if event.name == "aten::mm")
    assert not product.input_shapes
    with xt.profile(profile_memory=True) as prof:
        kept = torch.ones(1000)
    assert kept.numel() == 1000
    assert any(event.self_cpu_memory_usage >= 4000 for event in prof.key_averages())
