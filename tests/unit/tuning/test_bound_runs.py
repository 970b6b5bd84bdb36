# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Searches whose candidates are timed by bound runs: ``objective.call: bind``."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError
from xpuruntime.inference.calls import open_calls
from xpuruntime.policies import ExecutionPolicy, Policy
from xpuruntime.tuning.context import _call_mode
from xpuruntime.tuning.space import build_space
from xpuruntime.tuning.spec.tune_spec import TuneSpec

pytest.importorskip("onnxruntime")

DEMO = str(xrt.demo_model_path())
CPU = {"execution": {"device": "cpu", "engine": "onnxruntime"}}
ENGINES = ["onnxruntime", *(["openvino"] if importlib.util.find_spec("openvino") else [])]
ONE = {"threads": [1], "options": {"onnxruntime": {}}, "kernels": "off"}
QUICK = {"min_effect": "90%", "confidence": 0.8, "rounds": [3, 3]}


def feeds(*batches: int) -> list[dict[str, Any]]:
    draws = np.random.default_rng(0)
    return [{"image": draws.random((rows, 1, 8, 8), dtype=np.float32)} for rows in batches]


@pytest.mark.parametrize("engine", ENGINES)
def test_bound_calls_answer_as_plain_ones_do_at_every_shape(engine):
    made = feeds(1, 3, 1)
    with xrt.InferenceSession(DEMO, device="cpu", engine=engine) as session:
        bound, plain = (open_calls(session, made, call) for call in ("bind", "run"))
        for index in (0, 1, 2, 0):
            bound.poison()
            got = bound.outputs(index, bound.prepared(index)())
            want = plain.outputs(index, plain.prepared(index)())
            np.testing.assert_array_equal(got["logits"], want["logits"])
        bound.prepared(0)()
        bound.poison()
        assert np.isnan(bound.outputs(0, None)["logits"]).all(), "results of a run before are gone"
        assert (bound.graph, plain.graph) == ("off", None)
        bound.close()
        bound.close()
        with pytest.raises(InputError, match="Fix: give 'run' or 'bind'"):
            open_calls(session, made, "bound")


@pytest.mark.parametrize("engine", ENGINES[:1])
def test_a_search_of_bound_runs_says_what_was_timed(engine, tmp_path):
    arguments: dict[str, Any] = {
        "inputs": feeds(1, 1), "journal": tmp_path / "j",
        "spec": {"objective": {"maximise": "throughput", "concurrency": 2}, "decide": QUICK,
                 "space": {"threads": [1], "options": {engine: {}}, "kernels": "off"}},
    }  # fmt: skip
    policy = {"execution": {"device": "cpu", "engine": engine}}
    found = xrt.tune(DEMO, policy, call="bind", **arguments)
    control = found.candidate("c0")
    assert control.figure is not None
    assert (found.call, control.cuda_graph) == ("bind", "off")
    assert found.question == "throughput of bound runs at batch 1 and concurrency 2"
    assert found.question in " ".join(str(found).split())
    assert found.question in found.save_html(tmp_path / "t.html").read_text()
    size = arguments["journal"].stat().st_size
    again = xrt.tune(DEMO, policy, call="bind", resume=True, **arguments)
    assert (again.gain, arguments["journal"].stat().st_size) == (found.gain, size)
    with pytest.raises(InputError, match=r"is of another search: .*call was \"bind\" and is \"run\""):
        xrt.tune(DEMO, policy, call="run", resume=True, **arguments)


def test_faults_of_bound_runs_end_only_their_candidate(planted_plugin):
    faults = ["unbound", "stale", "stops"]
    found = xrt.tune(
        DEMO,
        {"execution": {"device": "cpu", "engine": "planted"}},
        inputs=feeds(1, 1, 1),
        call="bind",
        spec={
            "space": {"options": {"planted": {"fault": faults}}, "kernels": "off", "threads": ["engine"]},
            "decide": {"min_effect": "20%", "confidence": 0.6, "rounds": [3, 5]},
        },
    )
    key = "execution.provider_options.planted.fault"
    by = {candidate.changes.get(key): candidate for candidate in found.candidates if candidate.id != "c0"}
    codes = {fault: by[fault].code for fault in faults}
    wanted = {"unbound": "open_failed", "stale": "inaccurate", "stops": "inaccurate"}
    assert codes == wanted, [candidate.reason for candidate in found.candidates]
    assert (found.verdict, found.candidate("c0").cuda_graph) == ("tied", "off")
    assert "session.bind: planted has no fixed buffers" in by["unbound"].reason
    assert "while it was timed" in by["stops"].reason


@pytest.mark.parametrize(
    ("call", "graph", "space", "device", "wanted"),
    [
        (None, "off", (), "cuda:0", "run"),
        (None, "off", ("off", "require"), "cuda:0", "bind"),
        (None, "require", (), "cuda:0", "bind"),
        (None, "off", ("off", "require"), "cpu", "run"),
        ("run", "require", (), "cuda:0", "run"),
        ("bind", "off", (), "cpu", "bind"),
    ],
)
def test_the_call_follows_from_the_graphs_that_are_asked_for(call, graph, space, device, wanted):
    spec = TuneSpec.coerce({"objective": {} if call is None else {"call": call}, "space": {"cuda_graph": list(space)}})
    found, notes = _call_mode(spec, Policy(execution=ExecutionPolicy(cuda_graph=graph)), device)
    assert found == wanted
    assert bool(notes) == (call is None and wanted == "bind"), "what nobody stated is said"


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_are_searched_where_bound_runs_are_timed(graphs):
    from xpuruntime.engines.base import of_policy
    from xpuruntime.runtime.cpu_and_memory import CpuCores

    space = build_space(
        Policy(), TuneSpec().space, {"onnxruntime": of_policy("cuda:0")}, device="cuda:0", cores=CpuCores(2, 2),
        accuracy=True, graphs=graphs,
    )  # fmt: skip
    assert ("execution.cuda_graph" in [one.key for one in space.tunables["onnxruntime"]]) == graphs
    assert any("CUDA graphs were not searched" in note for note in space.notes) != graphs


def test_calls_that_cannot_be_are_refused():
    with pytest.raises(PolicyError, match=r"did you mean 'bind'"):
        xrt.tune(DEMO, CPU, inputs="random", call="bound")
    with pytest.raises(PolicyError, match=r"space\.cuda_graph.*contradicts objective\.call: run"):
        TuneSpec.loads("objective: {call: run}\nspace: {cuda_graph: [off, require]}\n")
    padded = {"execution": {**CPU["execution"], "static_batch": 4}}
    with pytest.raises(PolicyError, match=r"not padded to execution\.static_batch: 4. Fix: state objective\.batch: 4"):
        xrt.tune(DEMO, padded, inputs="random", call="bind")


def test_a_lock_of_bound_runs_keeps_what_its_time_is_of(tmp_path):
    path = tmp_path / "digits.lock"
    xrt.lock(DEMO, CPU, path, call="bind")
    assert xrt.load_lock(path).measured.latency_us["call"] == "bind"
    again = xrt.lock(DEMO, output=path, batches=[1])
    assert again.written
    assert again.lock.measured.latency_us["call"] == "bind", "as in the lock that was there"
    plain = xrt.lock(DEMO, CPU, tmp_path / "plain.lock").lock
    assert "call" not in plain.measured.latency_us


def test_a_null_engine_is_bound_too():
    with xrt.InferenceSession(DEMO, engine="null") as session:
        calls = open_calls(session, feeds(1), "bind")
        calls.prepared(0)()
        calls.close()
    with pytest.raises(UnsupportedOperationError, match=r"session\.bind: "), xrt.InferenceSession(DEMO) as session:
        open_calls(session, [{"image": np.zeros((1, 1, 8, 8), np.float64)}], "bind")
