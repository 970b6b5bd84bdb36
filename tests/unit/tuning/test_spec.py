# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Specifications of searches: read strictly, written back, and turned into a space."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

import xpuruntime as xrt
from xpuruntime.engines.base import Tunable
from xpuruntime.errors import PolicyError
from xpuruntime.policies import Policy
from xpuruntime.runtime.cpu_and_memory import CpuCores, cpu_cores
from xpuruntime.tuning.space import apply_changes, build_space
from xpuruntime.tuning.spec.parts import SearchSpace
from xpuruntime.tuning.spec.tune_spec import TuneSpec, tune_schema

FULL = """
schema: xpuruntime.tune/1
base: policy.yaml
inputs: samples.npz
objective: {minimise: latency.p50, batch: 1, concurrency: 1}
constraints: {accuracy: inherit, memory.peak: "<=2GiB", latency.p99: "<=5ms", determinism: run_to_run, start: "<=20s"}
space:
  engine: [onnxruntime, openvino]
  precision: [model, fp16, int8]
  cuda_graph: [off, require]
  threads: [1, physical, logical]
  layout: [auto, nhwc]
  kernels: auto
  options: {onnxruntime: {cudnn_conv_algo_search: [EXHAUSTIVE, HEURISTIC]}}
budget: {time: 10m, candidates: 200}
decide: {min_effect: 2%, confidence: 0.99, rounds: [7, 61]}
seed: 0
isolation: process
"""
CORES = CpuCores(2, 4)
THREADS = Tunable(key="execution.threads", values=(None, 1, 2, 2))
PRECISION = Tunable(key="execution.precision", values=("model", "fp16"))
MODE = Tunable(key="execution.provider_options.a.mode", values=(None, "fast"))
LEVEL = Tunable(
    key="execution.provider_options.a.level", values=(None, "1"), needs={"execution.provider_options.a.mode": ("fast",)}
)


def test_a_whole_file_is_read_and_written_back(tmp_path):
    path = tmp_path / "tune.yaml"
    path.write_text(FULL)
    spec = TuneSpec.load(path)
    assert spec.base == str(tmp_path / "policy.yaml"), "paths are relative to the file"
    assert spec.constraints.memory_peak == 2 << 30
    assert spec.constraints.latency_p99 == 0.005
    assert spec.space.threads == (1, "physical", "logical")
    assert TuneSpec.coerce(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objektive: {}", r"tune:1:1: unknown key 'objektive' in the specification; did you mean 'objective'\?"),
        ("constraints: {memory: 3}", r"unknown key 'memory' in constraints; did you mean 'memory\.peak'\?"),
        (
            "constraints: {memory.peak: 2GiB}",
            r"constraints\.memory\.peak: '2GiB' is not an upper limit. Fix: write '<=2GiB'",
        ),
        ("constraints: {memory.peak: '>=2GiB'}", r"'>=2GiB' is not an upper limit. Fix: write '<=2GiB'"),
        ("constraints: {latency.p99: '<=5'}", r"no unit is given"),
        ("objective: {minimise: latency.p5}", r"did you mean 'latency\.p50'\?"),
        ("objective: {minimise: memory, maximise: throughput}", r"contradicts maximise 'throughput'"),
        ("objective: {minimise: memory, concurrency: 4}", r"has no meaning for memory"),
        ("space: {batch: [1, 8]}", r"space\.batch: has no meaning for latency\.p50"),
        ("{objective: {maximise: throughput}, space: {batch: [0]}}", r"space\.batch"),
        ("{objective: {maximise: throughput}, space: {batch: 8}, ray: {}}", r"batch: is not searched on a Ray cluster"),
        ("decide: {rounds: [9, 7]}", r"the fewest, 9, are more than the most, 7"),
        ("decide: {rounds: 9}", r"a list of two"),
        ("space: {threads: [physcal]}", r"did you mean 'physical'\?"),
        ("space: {kernels: outo}", r"did you mean 'auto'\?"),
        ("space: {kernels: {matmul: [cublass]}}", r"space\.kernels\.matmul"),
        ("space: {options: {onnxruntime: {a: [1, true]}}}", r"listed twice"),
        ("space: {options: {onnxruntime: {a: 1}}}", r"a list of values to try"),
        ("schema: xpuruntime.tune/9", r"upgrade xpuruntime to read it"),
        ("isolation: thread", r"isolation"),
        ("budget: {time: 10}", r"has no unit"),
    ],
)
def test_bad_files_are_refused_with_the_place(text, message):
    with pytest.raises(PolicyError, match=message) as error:
        TuneSpec.loads(text)
    assert str(error.value).startswith("tune:1:")


def test_the_schema_names_the_keys_of_a_file():
    constraints = tune_schema()["properties"]["constraints"]["properties"]
    assert {"memory.peak", "latency.p99"} <= constraints.keys()
    jsonschema.Draft202012Validator(tune_schema()).validate(yaml.safe_load(FULL.replace("off,", "'off',")))


def test_cores_are_those_that_this_process_may_use():
    cores = cpu_cores()
    assert 1 <= cores.physical <= cores.logical


def built(base="", wanted=None, *, declared=None, accuracy=False):
    policy = Policy.loads(base) if base else Policy()
    return build_space(
        policy,
        SearchSpace(**(wanted or {})),
        declared or {"a": (PRECISION, THREADS, MODE, LEVEL)},
        device="cpu",
        cores=CORES,
        accuracy=accuracy,
    )


def waves(space):
    return [[point.changes for point in space.wave(size)] for size in range(space.waves)]


def test_waves_hold_each_combination_once_and_what_it_needs():
    space = built()
    first, second, third, *_ = waves(space)
    base = {"execution.engine": "a", "execution.device": "cpu"}
    assert first == [base]
    options = "execution.provider_options.a."
    assert second == [
        {**base, "execution.threads": 1},
        {**base, "execution.threads": 2},
        {**base, f"{options}mode": "fast"},
    ]
    assert {**base, f"{options}mode": "fast", f"{options}level": "1"} in third
    assert any("precision was not searched" in note for note in space.notes)


def test_the_precision_is_searched_where_an_accuracy_is_stated():
    assert {"execution.precision": "fp16"}.items() <= waves(built(accuracy=True))[1][0].items()
    assert not any("precision" in note for note in built(accuracy=True).notes)


def test_what_the_base_policy_states_is_fixed():
    space = built("execution: {threads: 3}\n")
    assert not any("execution.threads" in changes for wave in waves(space) for changes in wave)
    with pytest.raises(PolicyError, match=r"space\.threads searches execution\.threads, which the base policy fixes"):
        built("execution: {threads: 3}\n", {"threads": [1, "logical"]})


def test_stated_values_replace_those_of_the_engine():
    space = built(wanted={"threads": ["logical", 1], "options": {"a": {"other": ["x"]}}})
    first, second, *_ = waves(space)
    assert first[0]["execution.threads"] == 4
    assert [one["execution.threads"] for one in second] == [1, 4]
    assert second[1]["execution.provider_options.a.other"] == "x"
    with pytest.raises(PolicyError, match=r"space\.options\.b: this engine is not searched"):
        built(wanted={"options": {"b": {}}})


def test_changes_make_a_policy():
    base = Policy.loads("execution: {threads: 3, provider_options: {a: {x: 1}}}\n")
    changes = apply_changes(
        base, {"execution.engine": "a", "execution.provider_options.a.y": "2", "kernels.matmul": "cpu"}
    )
    assert changes.stated() == {
        "execution.engine": ("a",),
        "execution.threads": 3,
        "execution.provider_options.a.x": 1,
        "execution.provider_options.a.y": "2",
        "kernels.matmul": "cpu",
    }


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf"), 1e308, 10**400, -(10**400)])
def test_budgets_that_are_none(budget):
    with pytest.raises(PolicyError, match=r"is out of range\. Fix: state a duration from 1ms to 168h"):
        xrt.tune(xrt.demo_model_path(), inputs="random", budget=budget)
