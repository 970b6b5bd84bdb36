# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What sessions make of policies: fallback, options under aliases, rules in messages, evidence."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import PolicyError
from xpuruntime.runtime.machine import Machine
from xpuruntime.runtime.snapshot import machine_snapshot

X = np.ones((2, 1, 8, 8), np.float32)
MODEL = xrt.demo_model_path()
OPTION = "optimization.enable_gelu_approximation"


def without_cuda() -> Machine:
    """This machine, as if it had no CUDA device."""
    import msgspec

    facts = machine_snapshot(default_registry().engines())
    return msgspec.structs.replace(facts, cuda=(), cuda_reason="no NVIDIA driver was found")


def status_of(session: xrt.InferenceSession) -> dict[str, str]:
    return {observation.key: observation.status for observation in session.explain({"image": X}, runs=1).observations}


def test_a_listed_fallback_runs_and_is_told_in_plan_warning_and_evidence() -> None:
    policy = {"execution": {"device": "cuda:0", "fallback": ["onnxruntime@cpu"]}}
    with pytest.warns(xrt.XpuRuntimeWarning) as told:
        session = xrt.InferenceSession(MODEL, policy=policy, machine=without_cuda())
    with session:
        assert len(told) == 1
        assert session.plan.candidate == "onnxruntime@cpu"
        (line,) = session.plan.warnings
        assert line in str(told[0].message)
        assert "onnxruntime@cuda:0 was rejected (device_missing)" in line
        assert ". Fix: use device cpu" in line
        report = session.explain({"image": X}, runs=1)
    assert report.plan["warnings"] == [line]
    observed = {observation.key: observation.observed for observation in report.observations}
    assert observed["execution.device"].startswith("cpu")
    assert observed["execution.fallback"] == "used"


def test_a_fallback_that_was_not_needed_is_told_as_that() -> None:
    policy = {"execution": {"device": "cpu", "fallback": ["null@cpu"]}}
    with xrt.InferenceSession(MODEL, policy=policy) as session:
        observed = {
            observation.key: observation.observed for observation in session.explain({"image": X}, runs=1).observations
        }
    assert observed["execution.fallback"] == "not used"
    resolved = {control.key: control.resolved for control in session.plan.controls}
    assert resolved == {"execution.device": "cpu", "execution.fallback": "not needed"}


@pytest.mark.parametrize("name", ["onnxruntime", "ort", "onnxrt"])
def test_options_count_under_every_name_of_the_engine(name: str) -> None:
    policy = {"mode": "strict", "execution": {"device": "cpu", "provider_options": {name: {OPTION: True}}}}
    plan = xrt.plan(MODEL, policy=policy)
    assert plan.settings["session"] == {OPTION: "1"}
    with xrt.InferenceSession(MODEL, policy=policy) as session:
        assert status_of(session)[f"execution.provider_options.{name}.{OPTION}"] == "honoured"


@pytest.mark.parametrize("name", ["onnxruntime", "ort"])
def test_an_unknown_option_is_refused_under_every_name(name: str) -> None:
    policy = {"execution": {"device": "cpu", "provider_options": {name: {"enable_gelu_approximation": True}}}}
    with pytest.raises(xrt.PolicyError, match=f"did you mean '{OPTION}'"):
        xrt.plan(MODEL, policy=policy)


def test_options_of_another_engine_are_not_said_to_be_handed_over() -> None:
    options: dict[str, Any] = {"tensorrt": {"x": True}}
    plan = xrt.plan(MODEL, policy={"execution": {"device": "cpu", "provider_options": options}})
    control = next(control for control in plan.controls if "provider_options" in control.key)
    assert control.reason == "used when tensorrt runs, and only then"
    options["onnxruntim"] = {"y": True}
    with pytest.raises(PolicyError, match=r"'onnxruntim'; did you mean 'onnxruntime'\?.*Fix: write"):
        xrt.plan(MODEL, policy={"execution": {"device": "cpu", "provider_options": options}})


def test_a_precision_rule_may_leave_the_kernel_to_auto() -> None:
    rules = [{"match": {"node": "fc*"}, "use": "auto", "precision": "fp32"}]
    plan = xrt.plan(MODEL, device="cpu", precision="fp16", policy={"kernels": {"rules": rules}})
    control = next(control for control in plan.controls if control.key == "kernels.rules[0]")
    assert control.enforceability == "enforced"
    assert list(plan.settings["keep_fp32"]) == ["fc*"]


def test_mode_and_accuracy_are_honoured_in_the_evidence() -> None:
    policy = {
        "mode": "strict",
        "execution": {"device": "cpu", "precision": "fp32"},
        "accuracy": {"reference": "onnxruntime.cpu.fp32", "rtol": 1e-3, "cosine": 0.999},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xrt.InferenceSession(MODEL, policy=policy) as session:
            assert set(status_of(session).values()) == {"honoured"}
