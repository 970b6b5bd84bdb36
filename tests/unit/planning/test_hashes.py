# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Plan.request_hash` and `Plan.execution_hash`: each ingredient changes the right one, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import machines
import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt
from xpuruntime.demo import demo_model_path
from xpuruntime.engines.base import Engine, Judgement, LoadedModel, Request
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry
from xpuruntime.evidence.records import Verdict
from xpuruntime.planning import Plan, PlanRequest, resolve
from xpuruntime.planning.plan import DeviceIdentity, ExecutionFacts, LibraryIdentity, ModelFacts
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import CpuFacts, CudaFacts, EngineFacts, Library, Machine

REQUEST, EXECUTION, NEITHER = ("request",), ("execution",), ()

#: Every field that a plan has, another value of it, and the hash that the other value changes.
FIELDS: dict[tuple[type, str], tuple[Any, tuple[str, ...]]] = {
    (Plan, "mode"): ("strict", NEITHER),  # the policy has it
    (Plan, "engine"): ("beta", EXECUTION),
    (Plan, "device"): ("cuda:1", NEITHER),  # `execution` has what it is, and the policy what was asked
    (Plan, "precision"): ("fp16", EXECUTION),
    (Plan, "policy"): ({"execution": {"threads": 2}}, REQUEST),
    (Plan, "verdicts"): ((), NEITHER),
    (Plan, "controls"): ((), NEITHER),  # how well a key is enforced, in words; what it becomes is a setting
    (Plan, "settings"): ({"options": {"threads": 3}}, EXECUTION),
    (Plan, "warnings"): (("late",), NEITHER),
    (Plan, "notes"): (("so",), NEITHER),
    (Plan, "engine_version"): ("2.1", EXECUTION),
    (Plan, "calibration"): ("3" * 64, REQUEST),
    (Plan, "policy_source"): ("default", NEITHER),
    (ModelFacts, "path"): ("elsewhere.onnx", NEITHER),
    (ModelFacts, "sha256"): ("1" * 64, NEITHER),  # `digest` has it, and the external data with it
    (ModelFacts, "digest"): ("2" * 64, REQUEST),
    (ModelFacts, "size"): (1, NEITHER),
    (ModelFacts, "nodes"): (1, NEITHER),
    (ModelFacts, "ops"): ({}, NEITHER),
    (ModelFacts, "opsets"): ({}, NEITHER),
    (ModelFacts, "inputs"): ((), NEITHER),
    (ModelFacts, "outputs"): ((), NEITHER),
    (ExecutionFacts, "driver"): ("13.1", EXECUTION),
    (ExecutionFacts, "libraries"): ((), EXECUTION),
    (ExecutionFacts, "xpuruntime"): ("9.9", EXECUTION),
    (DeviceIdentity, "kind"): ("rocm", EXECUTION),
    (DeviceIdentity, "name"): ("NVIDIA H100", EXECUTION),
    (DeviceIdentity, "architecture"): ("sm89", EXECUTION),
    (DeviceIdentity, "features"): (("avx",), EXECUTION),
    (DeviceIdentity, "units"): (66, EXECUTION),
    (LibraryIdentity, "name"): ("libother.so.1", EXECUTION),
    (LibraryIdentity, "version"): ("1.2.4", EXECUTION),
    (LibraryIdentity, "build_id"): ("02", EXECUTION),
    (LibraryIdentity, "size"): (8, EXECUTION),
}
#: Fields that hold the others, or say in which form all are written.
INNER = {
    (Plan, "model"), (Plan, "execution"), (Plan, "schema"), (ExecutionFacts, "device"),
}  # fmt: skip
LIBRARY = Library(name="libengine.so.1", path="/opt/libengine.so.1", version="1.2.3", build_id="01", size=7)
CUBLAS = Library(name="libcublasLt.so.13", path="/opt/libcublasLt.so.13", version="13.1", build_id="0c", size=9)


def gpu(index: int, name: str = "NVIDIA H200") -> CudaFacts:
    return machines.gpu(index, name=name)


MACHINE = machines.machine(
    cpu=CpuFacts(name="cpu", cores=2, features=("avx2",)),
    cuda=(gpu(0), gpu(1), gpu(2, "NVIDIA B200")),
    core_cuda=True,
    core=Library(name="xpuruntime/_core", path="/opt/_core.so", build_id="0a", size=1),
    engines={
        "alpha": EngineFacts(name="alpha", version="2.0", loadable=True, libraries=(LIBRARY,), cuda_libraries=(CUBLAS,))
    },
)


class Alpha(Engine):
    name = "alpha"

    def probe(self) -> EngineFacts:
        raise AssertionError("planning must not probe")

    def devices(self, machine: Machine) -> tuple[str, ...]:
        return ("cuda:0", "cuda:1", "cuda:2", "cpu")

    def judge(self, request: Request, machine: Machine) -> Judgement:
        verdict = Verdict(candidate="alpha", accepted=True, code="accepted", reason="it runs all")
        return Judgement(verdict=verdict, settings={"options": {"threads": request.policy.execution.threads}})

    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        raise AssertionError("planning must not load")


def planned(policy: Any = None, machine: Machine = MACHINE, model: Any = None) -> Plan:
    info = inspect_model(model or demo_model_path())
    return resolve(PlanRequest(model=info), Policy.coerce(policy), machine, {"alpha": Alpha()})


def hashes(plan: Plan) -> dict[str, str]:
    return {"request": plan.request_hash, "execution": plan.execution_hash}


def changed(plan: Plan, other: Plan) -> tuple[str, ...]:
    before, after = hashes(plan), hashes(other)
    return tuple(name for name in before if before[name] != after[name])


def with_field(value: Any, owner: type, name: str, other: Any) -> Any:
    """Return `value` with another value of one field of the structure `owner` inside of it."""
    if isinstance(value, owner):
        return msgspec.structs.replace(value, **{name: other})
    if isinstance(value, tuple):
        return tuple(with_field(item, owner, name, other) for item in value)
    if isinstance(value, msgspec.Struct):
        inside = {field: with_field(getattr(value, field), owner, name, other) for field in value.__struct_fields__}
        return msgspec.structs.replace(value, **inside)
    return value


@pytest.mark.parametrize(("owner", "name"), FIELDS, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_a_field_changes_its_hash_and_no_other(owner: type, name: str) -> None:
    base = planned({"execution": {"device": "cuda:0"}})
    other, which = FIELDS[owner, name]
    assert changed(base, with_field(base, owner, name, other)) == which


def test_every_field_of_a_plan_is_decided_about() -> None:
    owners = (Plan, ModelFacts, ExecutionFacts, DeviceIdentity, LibraryIdentity)
    every = {(owner, name) for owner in owners for name in owner.__struct_fields__}
    assert every == {*FIELDS, *INNER}


def test_kernels_are_in_both_hashes_with_their_configurations() -> None:
    base = planned({"kernels": {"matmul": "cublas.matmul"}})
    assert base.kernels == {"matmul": "cublas.matmul"}
    assert changed(base, planned({"kernels": {"matmul": "cublas.matmul@3"}})) == ("request", "execution")
    assert changed(base, planned({"kernels": {"matmul": "cublas.matmul"}})) == ()


def test_equal_devices_are_equal_and_others_are_not() -> None:
    on = {name: planned({"execution": {"device": name}}) for name in ("cuda:0", "cuda:1", "cuda:2", "cpu")}
    assert on["cuda:0"].execution_hash == on["cuda:1"].execution_hash
    assert len({plan.execution_hash for plan in on.values()}) == 3
    assert on["cuda:0"].request_hash != on["cuda:1"].request_hash  # the policy names another one


def test_libraries_of_cuda_count_on_a_cuda_device_alone() -> None:
    facts = msgspec.structs.replace(
        MACHINE.engines["alpha"], cuda_libraries=(msgspec.structs.replace(CUBLAS, build_id="0d"),)
    )
    other = MACHINE.with_engines({"alpha": facts})
    for device, which in (("cuda:0", EXECUTION), ("cpu", NEITHER)):
        policy = {"execution": {"device": device}}
        assert changed(planned(policy), planned(policy, other)) == which
    moved = msgspec.structs.replace(MACHINE.engines["alpha"], libraries=(msgspec.structs.replace(LIBRARY, path="/x"),))
    assert changed(planned(), planned(machine=MACHINE.with_engines({"alpha": moved}))) == NEITHER


def test_the_machine_does_not_change_the_request() -> None:
    other = msgspec.structs.replace(MACHINE, cuda=(), cpu=CpuFacts(name="another", cores=64), architecture="aarch64")
    assert changed(planned(), planned(machine=other)) == EXECUTION


def test_a_model_is_its_contents_and_its_external_data(tmp_path: Path) -> None:
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(demo_model_path().read_bytes())
    assert changed(planned(), planned(model=copy)) == NEITHER

    def external(folder: Path, value: float) -> Path:
        folder.mkdir()
        weight = numpy_helper.from_array(np.full((64, 64), value, np.float32), "w")
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        value_of = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node], "g", [value_of("x", TensorProto.FLOAT, [1, 64])], [value_of("y", TensorProto.FLOAT, [1, 64])],
            [weight],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
        return folder / "m.onnx"

    one, same, other = (external(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)))
    assert one.read_bytes() == other.read_bytes()
    assert changed(planned(model=one), planned(model=same)) == NEITHER
    assert changed(planned(model=one), planned(model=other)) == REQUEST


def test_a_json_round_trip_and_an_older_plan(recwarn: pytest.WarningsRecorder) -> None:
    plan = planned()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hashes(again) == hashes(plan)
    older = json.loads(plan.to_json())
    del older["execution"], older["model"]["digest"], older["request_hash"], older["execution_hash"]
    read = Plan.from_json(json.dumps(older))
    assert changed(plan, read) == EXECUTION
    assert not recwarn.list


_CODE = """
import json, sys, xpuruntime as xrt
from xpuruntime.demo import demo_model_path
if sys.argv[1] == "torch":
    import torch
policy = {"execution": {"device": "cpu", "threads": 1}, "kernels": {"matmul": "auto"}}
found = {}
for engine in json.loads(sys.argv[2]):
    plan = xrt.plan(demo_model_path(), engine=engine, policy=policy)
    found[engine] = [plan.request_hash, plan.execution_hash]
print(json.dumps(found))
"""


def test_equal_in_every_process_and_for_every_hash_seed() -> None:
    here = [name for name in ("onnxruntime", "openvino") if find_spec(name) is not None]
    engines, torch = json.dumps(here), "torch" if find_spec("torch") is not None else "-"
    documents = []
    for seed, first in (("0", "-"), ("77", torch)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _CODE, first, engines],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        documents.append(json.loads(done.stdout))
    assert documents[0] == documents[1]
    assert len({one for name in here for one in documents[0][name]}) == 2 * len(here)


def test_real_engines_name_the_builds_of_their_libraries() -> None:
    named = 0
    for name, engine in default_registry().engines().items():
        facts = engine.probe()
        if facts.version is None or not engine.library_files or "cpu" not in (engine.device_kinds or ()):
            continue
        if "onnx" not in engine.formats:
            continue
        plan = xrt.plan(demo_model_path(), device="cpu", engine=name)
        assert plan.execution is not None
        builds = {library.name: library.build_id for library in plan.execution.libraries}
        assert len(builds) > 1, name
        assert all(builds.values()), builds
        assert "xpuruntime/_core" in builds
        named += 1
    assert named >= 1
