# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Real searches: planted candidates in worker processes, and the demo model on the engines that are installed."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import xpuruntime as xrt
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError
from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.tuning import runner
from xpuruntime.tuning.runner import Runner, RunnerJob
from xpuruntime.tuning.spec.parts import Constraints
from xpuruntime.tuning.trial import Candidate, OutOfTime, TrialDevice
from xpuruntime.tuning.trial_executors import ProcessExecutor

pytest.importorskip("onnxruntime")

DEMO = str(xrt.demo_model_path())
CPU = {"execution": {"device": "cpu", "engine": "onnxruntime"}}
QUICK = {"min_effect": "20%", "confidence": 0.6, "rounds": [3, 5]}


def samples(count: int):
    from xpuruntime.engines.registry import read_model

    feeds = [probe_feeds(read_model(DEMO), seed=seed) for seed in range(count)]
    return [{name: array[:1] for name, array in feed.items()} for feed in feeds]


def test_planted_candidates_never_win_and_end_only_themselves(planted_plugin, monkeypatch):
    monkeypatch.setattr("xpuruntime.tuning.trial_executors._OPEN", 8.0)  # seconds that the one that hangs is waited for
    faults = ["two_percent", "nan_once", "before", "late", "segv", "hang", "memory", "leak", "noise"]
    found = xrt.tune(
        DEMO,
        {"execution": {"device": "cpu", "engine": "planted"}},
        inputs=samples(50),
        spec={
            "space": {"options": {"planted": {"fault": faults}}, "kernels": "off", "threads": ["engine"]},
            "constraints": {"memory.peak": "<=400MiB"},
            "decide": QUICK,
            "budget": {"time": "5m"},
        },
    )
    by = {
        candidate.changes.get("execution.provider_options.planted.fault"): candidate
        for candidate in found.candidates
        if candidate.id != "c0"
    }
    codes = {fault: by[fault].code for fault in faults}
    assert codes == {
        "two_percent": "inaccurate",
        "nan_once": "inaccurate",
        "before": "inaccurate",
        "late": "inaccurate",
        "segv": "crashed",
        "hang": "timeout",
        "memory": "memory",
        "leak": "memory",
        "noise": "winner",
    }, [candidate.reason for candidate in found.candidates]
    assert "NaN" in by["nan_once"].reason
    assert "input 49" in by["nan_once"].reason
    assert "SIGSEGV" in by["segv"].reason
    assert "while it was timed" in by["late"].reason
    assert found.gain is not None
    assert found.gain.low > 1.2
    assert found.changes == {
        "execution.engine": "planted", "execution.device": "cpu", "execution.provider_options.planted.fault": "noise"
    }  # fmt: skip


def test_a_measurement_is_cut_off_where_the_budget_ends(planted_plugin, tmp_path):
    (inputs,) = samples(1)
    write_arrays(tmp_path / "inputs-0", inputs)
    options = {"planted": {"fault": "hang"}}
    policy = {"execution": {"device": "cpu", "engine": "planted", "provider_options": options}}
    job = RunnerJob(
        model=DEMO, policy=policy, trust=False, calibration=None, samples=str(tmp_path), count=1, tolerance={}
    )
    executor = ProcessExecutor(lambda constraint: job, Constraints(), TrialDevice(name="cpu", device="cpu"))
    began = time.monotonic()
    executor.time_left = lambda: began + 3.0 - time.monotonic()
    candidate = Candidate(id="c1", engine="planted", device="cpu", changes={}, policy=policy)
    with pytest.raises(OutOfTime, match="the budget of time was used up"):
        executor.trial(candidate)
    assert not executor._workers
    with pytest.raises(OutOfTime):
        executor.measure_fresh([candidate, candidate])


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO")
def test_the_demo_model_on_two_engines(tmp_path):
    journal, stages = tmp_path / "j", []
    arguments = {
        "inputs": "random",
        "journal": journal,
        "spec": {
            "space": {
                "engine": ["onnxruntime", "openvino"],
                "threads": ["engine", 1],
                "options": {"onnxruntime": {}, "openvino": {}},
                "kernels": "off",
            },
            "decide": QUICK,
        },
    }
    found = xrt.tune(DEMO, CPU, progress=lambda one: stages.append(one.stage), **arguments)
    assert found.verdict in ("winner", "tied", "undecided")
    assert {candidate.engine for candidate in found.candidates} == {"onnxruntime", "openvino"}
    raced = [candidate for candidate in found.candidates if candidate.figure is not None]
    assert len(raced) >= 3
    assert all(one.error is not None and one.error < 1e-3 and one.memory and one.start for one in raced)
    assert {"open", "race"} <= set(stages)
    assert any("generated" in note for note in found.notes)
    assert set(found.front) <= {one.id for one in raced}
    assert json.loads(found.to_json())["exit_code"] == found.exit_code
    if found.verdict != "undecided":
        path = found.write_policy(tmp_path / "tuned.yaml")
        assert found.headline in path.read_text()
        assert xrt.Policy.load(path) == found.tuned_policy()
    size = journal.stat().st_size
    again = xrt.tune(DEMO, CPU, resume=True, **arguments)
    assert journal.stat().st_size == size, "nothing was measured again"
    assert (again.verdict, again.winner, again.gain) == (found.verdict, found.winner, found.gain)


@pytest.mark.parametrize(("objective", "concurrency"), [("throughput", 2), ("cold_start", 1)])
def test_other_objectives_are_measured(objective, concurrency):
    which = {"maximise": objective} if objective == "throughput" else {"minimise": objective}
    found = xrt.tune(
        DEMO,
        CPU,
        inputs="random",
        spec={
            "objective": {**which, "concurrency": concurrency, "batch": 2},
            "space": {"threads": [1], "options": {"onnxruntime": {}}, "kernels": "off"},
            "decide": {"min_effect": "90%", "confidence": 0.8, "rounds": [3, 3], "duel_rounds": 3},
        },
    )
    control = found.candidate("c0")
    assert control.figure is not None
    assert 0 < control.figure < 60
    assert found.objective == objective


def test_a_session_in_this_process():
    found = xrt.tune(
        DEMO,
        CPU,
        inputs="random",
        spec={
            "isolation": "none",
            "space": {"threads": ["engine", 1], "options": {"onnxruntime": {}}, "kernels": "off"},
            "decide": QUICK,
        },
    )
    assert found.verdict in ("winner", "tied", "undecided")
    assert found.candidate("c0").figure is not None


def test_inputs_for_which_nothing_can_be_compared_are_refused():
    """NaN agrees with NaN: each candidate, the wrong ones too, would have passed."""
    name = next(iter(samples(1)[0]))
    lost = [{name: np.full_like(sample[name], np.nan)} for sample in samples(3)]
    with pytest.raises(InputError, match=r"finite value other than zero in 'logits'.*Fix: give inputs like those"):
        xrt.tune(DEMO, CPU, inputs=lost, budget=20.0)


def test_an_output_in_which_nothing_was_compared_is_a_note(tmp_path):
    model = onnx.load(DEMO)
    name = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("Sub", [name, name], ["zero"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("zero", onnx.TensorProto.FLOAT, None))
    path = tmp_path / "zero.onnx"
    onnx.save(model, path)
    spec = {"space": {"threads": ["engine", 1], "options": {"onnxruntime": {}}, "kernels": "off"}, "decide": QUICK}
    found = xrt.tune(str(path), CPU, inputs=samples(3), spec=spec, budget=10.0)
    assert any("no finite value other than zero in 'zero'" in note for note in found.notes)


def test_what_cannot_be_searched_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a search needs inputs.*'random' to have some generated"):
        xrt.tune(DEMO, CPU)
    if not list(Path("/sys/class/powercap").glob("intel-rapl:*")):
        with pytest.raises(UnsupportedOperationError, match="energy of the processor cannot be measured"):
            xrt.tune(DEMO, CPU, inputs="random", objective="energy")
    with pytest.raises(UnsupportedOperationError, match="isolation: process"):
        xrt.tune(DEMO, CPU, inputs="random", objective="memory", spec={"isolation": "none"})
    with pytest.raises(PolicyError, match="which the base policy fixes"):
        xrt.tune(DEMO, {"execution": {"threads": 1}}, inputs="random", spec={"space": {"threads": [2]}})
    with pytest.raises(PolicyError, match=r"execution\.lock: a\.lock, and a search changes what a lock holds"):
        xrt.tune(DEMO, {"execution": {"lock": "a.lock"}}, inputs="random")
    with pytest.raises(InputError, match=r"inputs: .*no file or folder"):
        xrt.tune(DEMO, CPU, inputs=str(tmp_path / "none.npz"))
    np.savez(tmp_path / "wrong.npz", nonsense=np.zeros((2, 3), np.float32))
    with pytest.raises(InputError, match=r"^inputs: "):
        xrt.tune(DEMO, CPU, inputs=str(tmp_path / "wrong.npz"))
    with pytest.raises(InputError, match="another is given"):
        xrt.tune(DEMO, CPU, inputs="random", spec={"base": "policy.yaml"})


def demo_job(folder, **more):
    image = np.random.default_rng(0).random((1, 1, 8, 8), dtype=np.float32)
    policy = {"execution": {"device": "cpu", "engine": "onnxruntime"}}
    with xrt.InferenceSession(DEMO, policy=policy) as session:
        write_arrays(folder / "outputs-0", session.run({"image": image}))
    write_arrays(folder / "inputs-0", {"image": image})
    return RunnerJob(
        model=DEMO, policy=policy, trust=False, calibration=None, samples=str(folder), count=1,
        tolerance={"rtol": 1e-3, "atol": 1e-3, "cosine": 0.999}, **more,
    )  # fmt: skip


def test_a_turn_lasts_until_the_energy_counter_moves(tmp_path, monkeypatch):
    class Counter:
        """Moves by 6 J with the fourth reading, and never again."""

        readings = 0

        def read(self):
            self.readings += 1
            return (6 * (self.readings >= 4),)

        def joules(self, before, after):
            return float(after[0] - before[0])

    monkeypatch.setattr(runner, "open_meter", lambda device: Counter())
    monkeypatch.setattr(runner, "_ENERGY_BLOCK", 1e-9)
    made = Runner(demo_job(tmp_path, objective="energy"))
    assert made.check()["passed"]
    assert made.turn() == {"figure": 6.0 / 3, "wrong": ""}, "in three blocks of one run"
    monkeypatch.setattr(runner, "_ENERGY_MOST", 0.0)
    with pytest.raises(UnsupportedOperationError, match="stood still for 0"):
        made.turn()
    made.close()


def test_outputs_that_passed_are_compared_again_only_where_they_differ(tmp_path, monkeypatch):
    job = demo_job(tmp_path)
    made = Runner(job)
    assert made.check()["passed"]
    compared = []
    monkeypatch.setattr(runner, "compare_within", lambda *given: compared.append(given) or compare_within(*given))
    assert made.turn()["wrong"] == ""
    assert not compared
    right = made._calls.outputs

    def wrong(index, results):
        return {name: array + np.float32(0.5) for name, array in right(index, results).items()}

    made._calls.outputs = wrong
    assert "while it was timed, for input 0" in made.turn()["wrong"]
    assert len(compared) == 1
    made.close()


@pytest.mark.timed
def test_the_batch_is_searched_for_throughput(tmp_path):
    """A run of 32 images takes far less than 32 times as long as one of a single image."""
    images = xrt.demo_images()[0][:32]
    spec = {
        "objective": {"maximise": "throughput"},
        "space": {"batch": [1, 32], "threads": ["engine"], "options": {"onnxruntime": {}}, "kernels": "off"},
        "decide": {**QUICK, "rounds": [3, 3], "duel_rounds": 3},
        "isolation": "none",
    }
    found = xrt.tune(DEMO, CPU, inputs={"image": images}, spec=spec, budget=60.0, journal=tmp_path / "j")
    assert (found.verdict, found.changes["batch"], found.batch) == ("winner", 32, 32), str(found)
    assert found.question == "throughput of plain runs at batch 32 and concurrency 1"
    assert "batch" in found.write_policy(tmp_path / "p.yaml").read_text().splitlines()[1]
    assert xrt.Policy.load(tmp_path / "p.yaml").execution.engine == ("onnxruntime",)
    again = xrt.tune(DEMO, CPU, inputs={"image": images}, spec=spec, budget=60.0, journal=tmp_path / "j", resume=True)
    assert (again.verdict, again.batch, again.gain) == (found.verdict, 32, found.gain)
    padded = {"execution": {**CPU["execution"], "static_batch": 8}}
    with pytest.raises(PolicyError, match=r"space\.batch searches the batch, and execution\.static_batch: 8 fixes it"):
        xrt.tune(DEMO, padded, inputs="random", spec=spec)
    with pytest.raises(InputError, match="has 4 rows, and a batch of 32 is asked for"):
        xrt.tune(DEMO, CPU, inputs={"image": images[:4]}, spec=spec)


def int8_search(**space):
    """A specification of few, short trials."""
    space = {
        "engine": ["onnxruntime"],
        "threads": ["engine"],
        "kernels": "off",
        "options": {"onnxruntime": {}},
        **space,
    }
    return {"space": space, "decide": QUICK, "budget": {"time": "4m"}}


@pytest.mark.parametrize(("accuracy", "named"), [(None, False), ({"cosine": 0.9, "rtol": 1.0, "atol": 10.0}, True)])
def test_int8_is_searched_beside_floats(tmp_path, accuracy, named):
    """The calibration is for the candidates that are quantized, whether it is an argument or named by the policy."""
    np.savez(
        tmp_path / "samples.npz",
        **{name: np.concatenate([sample[name] for sample in samples(8)]) for name in samples(1)[0]},
    )
    spec = int8_search(precision=["model", "int8"])
    if accuracy is not None:
        spec["constraints"] = {"accuracy": accuracy}
    calibration, policy = tmp_path / "samples.npz", CPU
    if named:
        from xpuruntime.engines.quantization import Calibration
        from xpuruntime.engines.registry import read_model

        digest = f"sha256:{Calibration.of(str(calibration), read_model(DEMO)).digest}"
        policy, calibration = {**CPU, "calibration": {"path": str(calibration), "digest": digest}}, None
    found = xrt.tune(DEMO, policy, inputs=samples(4), spec=spec, calibration=calibration)
    codes = {
        candidate.changes.get("execution.precision"): candidate
        for candidate in found.candidates
        if candidate.id != "c0"
    }
    assert next(candidate for candidate in found.candidates if candidate.id == "c0").code in ("control", "duplicate")
    assert codes["int8"].code in ("slower", "not_faster", "undecided", "inaccurate", "winner", "beaten"), codes["int8"]
    assert ("calibration" in found.policy) == (named and (accuracy is not None or found.winner is not None))


def test_a_calibration_that_no_candidate_would_use_is_refused(tmp_path):
    np.savez(tmp_path / "samples.npz", **samples(1)[0])
    with pytest.raises(InputError, match=r"no candidate is quantized.*Fix: state space.precision: \[model, int8\]"):
        xrt.tune(DEMO, CPU, inputs=samples(1), spec=int8_search(), calibration=tmp_path / "samples.npz")


def test_int8_without_a_calibration_is_one_rejected_candidate():
    found = xrt.tune(DEMO, CPU, inputs=samples(1), spec=int8_search(precision=["model", "int8"]))
    (int8,) = (candidate for candidate in found.candidates if candidate.changes.get("execution.precision") == "int8")
    assert int8.code == "infeasible"
    assert "pass calibration=" in int8.reason
