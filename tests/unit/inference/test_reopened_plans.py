# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`InferenceSession(plan=...)` and `SessionSpec`: a session that opens exactly what was planned, in any process."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

import xpuruntime as xrt
from xpuruntime.engines.registry import EngineRegistry, default_registry
from xpuruntime.errors import EngineError, InputError, PlanError, PolicyError
from xpuruntime.planning import Plan
from xpuruntime.planning.plan import LibraryIdentity
from xpuruntime.runtime.snapshot import machine_snapshot

MODEL = xrt.demo_model_path()
FEEDS = {"image": np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 1, 8, 8)}
POLICY = {"execution": {"device": "cpu", "engine": "onnxruntime", "threads": 1}}


def planned(**arguments: Any) -> Plan:
    return xrt.plan(MODEL, **(arguments or {"policy": POLICY}))


def expected() -> np.ndarray:
    return onnxruntime.InferenceSession(str(MODEL), providers=["CPUExecutionProvider"]).run(None, FEEDS)[0]


def replaced(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


def executed_on(plan: Plan, **fields: Any) -> Plan:
    return replaced(plan, execution=msgspec.structs.replace(plan.execution, **fields))


def test_a_plan_that_was_read_back_is_opened_as_it_is() -> None:
    plan = planned()
    again = Plan.from_json(plan.to_json())
    with xrt.InferenceSession(MODEL, plan=again) as session:
        assert session.plan == plan
        assert session.policy.execution.threads == 1
        np.testing.assert_allclose(session.run(FEEDS)["logits"], expected(), rtol=1e-5)
        assert session.explain(FEEDS, runs=1).plan["execution_hash"] == plan.execution_hash


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "null"])
def test_plans_of_every_engine_here_survive_json_and_open(engine: str) -> None:
    if default_registry().get(engine).probe().version is None:
        pytest.skip(f"{engine} is not installed")
    plan = planned(engine=engine)
    assert Plan.from_json(plan.to_json()) == plan
    with xrt.InferenceSession(MODEL, plan=Plan.from_json(plan.to_json())) as session:
        assert session.plan.candidate == plan.candidate


def test_the_planned_engine_alone_is_asked() -> None:
    plan = planned(device="cpu")  # the engine is left open
    registry = default_registry()
    names = []

    class Spy(EngineRegistry):
        def engines(self) -> Any:
            return registry.engines()

        def get(self, name: str) -> Any:
            names.append(name)
            return registry.get(name)

    with xrt.InferenceSession(MODEL, plan=plan, registry=Spy()):
        assert set(names) == {plan.engine}


class TestRefused:
    def test_another_model(self, tmp_path: Path) -> None:
        model = onnx.load(MODEL)
        model.producer_name = "another"
        onnx.save(model, tmp_path / "other.onnx")
        with pytest.raises(PlanError, match=r"model: the plan is of sha256 [0-9a-f]{12}"):
            xrt.InferenceSession(tmp_path / "other.onnx", plan=planned())

    def test_the_same_model_elsewhere_is_opened(self, tmp_path: Path) -> None:
        copy = tmp_path / "copy.onnx"
        copy.write_bytes(Path(MODEL).read_bytes())
        with xrt.InferenceSession(copy, plan=planned()) as session:
            assert session.plan.engine == "onnxruntime"

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"device": "auto"}, r"policy: execution\.device is cpu in the plan"),
            ({"policy": {"execution": {"threads": 2}}}, r"policy: execution\.threads is 1 in the plan, and 2"),
            ({"precision": "fp16"}, r"policy: execution\.precision"),
        ],
    )
    def test_another_policy(self, arguments: dict[str, Any], named: str) -> None:
        with pytest.raises(PlanError, match=named):
            xrt.InferenceSession(MODEL, plan=planned(), **arguments)

    def test_the_same_policy_is_opened(self) -> None:
        with xrt.InferenceSession(MODEL, device="cpu", policy=POLICY, plan=planned()) as session:
            assert session.plan.device == "cpu"

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            (lambda plan: replaced(plan, engine_version="0.1"), "engine: onnxruntime 0.1 in the plan"),
            (lambda plan: replaced(plan, settings={**plan.settings, "level": "basic"}), "setting: level is basic"),
            (lambda plan: replaced(plan, calibration="0" * 64), "calibration"),
            (lambda plan: replaced(plan, execution=None), "machine: the plan does not note"),
            (lambda plan: executed_on(plan, driver="13.9"), "driver: 13.9 in the plan, None here"),
            (lambda plan: executed_on(plan, xpuruntime="0.0"), "xpuruntime: 0.0 in the plan"),
            (
                lambda plan: executed_on(plan, device=msgspec.structs.replace(plan.execution.device, name="Z80")),
                "device: name is Z80 in the plan",
            ),
            (
                lambda plan: executed_on(plan, libraries=(LibraryIdentity(name="libgone.so.1", build_id="0a"),)),
                "library: libgone.so.1 is build ID 0a in the plan, and missing here",
            ),
        ],
        ids=["engine", "setting", "calibration", "unknown", "driver", "xpuruntime", "device", "library"],
    )
    def test_another_machine_or_engine(self, changed: Any, named: str) -> None:
        with pytest.raises(PlanError) as error:
            xrt.InferenceSession(MODEL, plan=changed(planned()))
        assert named in str(error.value)
        assert "Fix: make the plan again" in str(error.value)

    def test_an_engine_that_is_not_registered(self) -> None:
        with pytest.raises(PlanError, match="not registered here"):
            xrt.InferenceSession(MODEL, plan=replaced(planned(), engine="elsewhere"))

    def test_a_device_that_is_not_here(self) -> None:
        plan = replaced(planned(), device="npu")
        with pytest.raises((EngineError, xrt.UnsupportedOperationError), match="device"):
            xrt.InferenceSession(MODEL, plan=plan)

    def test_a_plan_that_was_changed_by_hand(self) -> None:
        plain = json.loads(planned().to_json())
        plain["settings"]["threads"] = 8
        with pytest.raises(InputError, match="changed after it was written: its execution_hash"):
            Plan.from_json(json.dumps(plain))

    def test_what_is_no_plan(self) -> None:
        with pytest.raises(InputError, match=r"Plan\.from_json"):
            xrt.InferenceSession(MODEL, plan=planned().to_json())  # type: ignore[arg-type]


def opened(spec: xrt.SessionSpec) -> tuple[Any, str, str]:
    with spec.open() as session:
        return session.run(FEEDS)["logits"], session.plan.request_hash, session.plan.execution_hash


class TestSpec:
    def test_pickled_equal_and_hashable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(Path(MODEL).parent)
        spec = xrt.SessionSpec(model=Path(MODEL).name, policy=POLICY)
        monkeypatch.chdir(tmp_path)
        again = pickle.loads(pickle.dumps(spec))
        assert again == spec
        assert (again.model, again.policy) == (str(MODEL), xrt.Policy.coerce(POLICY))
        np.testing.assert_allclose(opened(again)[0], expected(), rtol=1e-5)
        with pytest.raises(AttributeError):
            spec.device = "cpu"  # type: ignore[misc]

    def test_a_policy_file_is_read_once(self, tmp_path: Path) -> None:
        file = tmp_path / "policy.yaml"
        xrt.Policy.coerce(POLICY).save(file)
        spec = xrt.SessionSpec(model=MODEL, policy=file)
        file.unlink()
        with spec.open() as session:
            assert session.policy.execution.threads == 1

    def test_opened_in_a_process_that_was_spawned(self) -> None:
        spec = xrt.SessionSpec(model=MODEL, plan=planned())
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            logits, request, execution = pool.apply(opened, (spec,))
        np.testing.assert_allclose(logits, expected(), rtol=1e-5)
        assert (request, execution) == (planned().request_hash, planned().execution_hash)

    def test_a_lock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        xrt.lock(MODEL, POLICY, "model.lock")
        spec = pickle.loads(pickle.dumps(xrt.SessionSpec(model=MODEL, policy=POLICY, lock="model.lock")))
        assert spec.lock == str(tmp_path / "model.lock")
        np.testing.assert_allclose(opened(spec)[0], expected(), rtol=1e-5)
        other = xrt.SessionSpec(model=MODEL, policy={"execution": {"device": "cpu", "threads": 2}}, lock="model.lock")
        with pytest.raises(xrt.LockError):
            other.open()

    def test_an_artifact(self, tmp_path: Path) -> None:
        xrt.compile_model(MODEL, tmp_path / "model.xrt", policy=POLICY)
        spec = pickle.loads(pickle.dumps(xrt.SessionSpec(model=tmp_path / "model.xrt")))
        np.testing.assert_allclose(opened(spec)[0], expected(), rtol=1e-5)
        plan = xrt.plan(tmp_path / "model.xrt")
        with xrt.InferenceSession(tmp_path / "model.xrt", plan=Plan.from_json(plan.to_json())) as session:
            assert session.plan.request_hash == plan.request_hash

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"model": object()}, TypeError),
            ({"model": ""}, InputError),
            ({"model": "m.onnx", "policy": {"execution": {"devise": "cpu"}}}, PolicyError),
            ({"model": "m.onnx", "plan": "{}"}, InputError),
            ({"model": "m.onnx", "plan": planned(), "lock": "m.lock"}, InputError),
        ],
    )
    def test_what_is_no_spec(self, arguments: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            xrt.SessionSpec(**arguments)


def test_a_plan_of_another_process_is_opened_here(tmp_path: Path) -> None:
    code = (
        "import sys, xpuruntime as xrt\n"
        "sys.stdout.write(xrt.plan(xrt.demo_model_path(), engine='onnxruntime', device='cpu').to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "5"},
    )  # fmt: skip
    plan = Plan.from_json(done.stdout)
    with xrt.InferenceSession(MODEL, plan=plan) as session:
        assert session.plan == plan
        np.testing.assert_allclose(session.run(FEEDS)["logits"], expected(), rtol=1e-5)


def test_a_plan_for_another_machine_is_refused_on_this_one() -> None:
    here = machine_snapshot([default_registry().get("onnxruntime")])
    other = msgspec.structs.replace(here, cpu=msgspec.structs.replace(here.cpu, name="another CPU", cores=77))
    plan = xrt.plan(MODEL, policy=POLICY, machine=other)
    with pytest.raises(PlanError) as error:
        xrt.InferenceSession(MODEL, plan=plan)
    assert "device: name is another CPU" in str(error.value)
    assert "device: units is 77" in str(error.value)
