# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Counted runs: what OpenVINO's whole means tell, and whose time is whose."""

from __future__ import annotations

import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import xpuruntime as xrt
from xpuruntime.engines.openvino import counters
from xpuruntime.engines.openvino.counters import Counted, bounded

pytest.importorskip("openvino")


def means(times: list[int]) -> list[int]:
    """Return what OpenVINO tells after each run of one node."""
    return [total // k for k, total in enumerate(accumulate(times), 1)]


@pytest.mark.parametrize("seed", range(40))
def test_the_truth_is_within_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    size, runs = rng.choice([1, 3, 50, 5000]), rng.choice([1, 2, 10])
    times = [size * 20, *(rng.randint(0, size) for _ in range(2 + runs))]
    found = bounded(means(times), runs)
    true = sum(times[-runs:]) / runs
    assert found.low <= true <= found.high
    assert found.high - found.low <= 2 * len(times) / runs
    assert len(found.sums) == runs + 1
    for number, took in enumerate(times[-runs:]):
        least, most = found.of_run(number)
        assert least <= took <= most
    for (least, most), total in zip(found.sums, list(accumulate(times))[-runs - 1 :], strict=True):
        assert least <= total <= most


def test_the_first_run_is_exact_and_a_mean_that_falls_tells_much() -> None:
    assert bounded([500, 252], 1).sums[0] == (500, 500)
    assert bounded([500, 252], 1) == counters.NodeCounter(4, 5, ((500, 500), (504, 505)))
    assert bounded(means([90, 2, 2, 2]), 3).low == 2


def test_runs_in_which_the_machine_was_away_are_left_out() -> None:
    """Only where the counters prove that no unit has the time."""
    counts = {"a": bounded(means([90, 30, 30, 30, 31, 30, 30]), 4)}
    assert Counted(counts=counts, spent=[40.0, 4_000.0, 41.0, 79.0]).kept(["a"]) == [40.0, 41.0, 79.0]
    assert Counted(counts=counts, spent=[4_000.0, 4_100.0, 4_200.0, 4_000.0]).kept(["a"]) == [4e3, 4.1e3, 4.2e3, 4e3]
    inside = {"a": bounded(means([90, 30, 30, 30, 3_980, 30, 30]), 4)}
    assert Counted(counts=inside, spent=[40.0, 4_000.0, 41.0, 40.0]).kept(["a"]) == [40.0, 4_000.0, 41.0, 40.0]


def test_runs_that_are_left_out_are_told(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = counters.count

    def disturbed(*given: Any) -> Counted:
        result = original(*given)
        result.spent[1] = min(result.spent) + 50_000.0
        return result

    monkeypatch.setattr("xpuruntime.engines.openvino.observing.count", disturbed)
    with xrt.InferenceSession(mlp, device="cpu", engine="openvino") as session:
        report = session.explain(runs=5)
    assert report.latency is not None
    found = report.latency.detail["instrumented"]
    assert found["run_us"] < 50_000
    assert found["runs"] < 5
    told = [note for note in report.notes if "instrumented runs are not in the time of a run" in note]
    assert len(told) == 1
    assert told[0].startswith(f"{5 - found['runs']} of 5 ")


def explained(path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> xrt.Report:
    """Explain with `call` around each run of the instrumented copy."""
    original = counters.infer_call
    monkeypatch.setattr(counters, "infer_call", lambda request: lambda *given: call(original(request), *given))
    with xrt.InferenceSession(path, device="cpu", engine="openvino") as session:
        return session.explain(runs=4)


def test_time_of_python_is_not_that_of_the_runs(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow(call: Any, *given: Any) -> Any:
        calls.append(call)
        if len(calls) > 1 + counters._SETTLE + 4:  # those of the graph without operators
            return call(*given)
        time.sleep(0.05)
        answer = call(*given)
        time.sleep(0.05)
        return answer

    report = explained(mlp, monkeypatch, slow)
    assert report.latency is not None
    assert report.latency.detail["instrumented"]["run_us"] < 50_000
    assert len(calls) == 1 + counters._SETTLE + 4 + counters._IDLE_WARM + counters._IDLE_RUNS


def test_a_run_that_fails(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def breaking(call: Any, *given: Any) -> Any:
        calls.append(call)
        if len(calls) == 1 + counters._SETTLE + 2:
            raise RuntimeError("the device fell\noff the bus")
        return call(*given)

    report = explained(mlp, monkeypatch, breaking)
    assert report.partial
    assert "an instrumented run failed: the device fell off the bus" in report.notes
    assert all(unit.time is None for unit in report.units)
    assert report.units
    assert report.latency is not None
    assert "instrumented" not in report.latency.detail


def test_a_graph_without_operators_that_does_not_run(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no graph without operators here")

    monkeypatch.setattr("xpuruntime.engines.openvino.observing.idle_call_us", refuse)
    with xrt.InferenceSession(mlp, device="cpu", engine="openvino") as session:
        report = session.explain(runs=2)
    assert not report.partial
    assert any("what a request itself costs is not known" in note for note in report.notes)
    assert report.latency is not None
    assert "outside" not in report.latency.detail["instrumented"]


def test_several_streams_are_counted_on_one(wide: Path) -> None:
    """Each stream has counters of its own, and OpenVINO runs a request on any of them."""
    policy = {
        "execution": {
            "engine": "openvino",
            "device": "cpu",
            "threads": 2,
            "provider_options": {"openvino": {"NUM_STREAMS": "2"}},
        }
    }
    with xrt.InferenceSession(wide, policy=policy) as session:
        report = session.explain(runs=6)
    assert any(
        note.startswith("the session has 2 streams; the copy that was counted has one, with 1 ")
        for note in report.notes
    )
    assert report.latency is not None
    found = report.latency.detail["instrumented"]
    assert found["cut_us"] > 0
    assert 0 < found["coverage"] <= 1.1
    assert report.honoured, "the streams that were asked for are read back, and not those of the copy"
    assert not [conversion for conversion in report.conversions if "NUM_STREAMS" in str(conversion)]
