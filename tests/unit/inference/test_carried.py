# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a model carries: a policy that holds where none is stated, marks on nodes, and a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from machines import gpu, machine

import xpuruntime as xrt
from xpuruntime.evidence.metadata import (
    KERNEL_KEY,
    LOCK_KEY,
    POLICY_KEY,
    onnx_digest,
    pinned_by_rule,
    read_policy,
)
from xpuruntime.lockfile.canonical import ExportLock
from xpuruntime.lockfile.records import CallEntry
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.testing import models

OURS = xrt.Policy(kernels={"matmul": "cpu.blas"})
X = {"x": np.ones((2, 64), np.float32)}


def lock_for(proto: onnx.ModelProto, **changes: Any) -> ExportLock:
    told: dict[str, Any] = {
        "torch": "2.13.0",
        "xpuruntime": "0.1.0",
        "exporter": "torch.onnx",
        "opset": 17,
        "weights": onnx_digest(proto.graph),
        "device": "cpu",
    }
    return ExportLock(**{**told, **changes})


def write(
    folder: Path,
    policy: xrt.Policy | str | None = OURS,
    lock: ExportLock | str | None = None,
    marks: dict[str, str] | None = None,
    proto: onnx.ModelProto | None = None,
) -> Path:
    proto = models.mlp() if proto is None else proto
    if policy is not None:
        text = policy if isinstance(policy, str) else policy.dumps("json")
        proto.metadata_props.add(key=POLICY_KEY, value=text)
    if lock is not None:
        proto.metadata_props.add(key=LOCK_KEY, value=lock if isinstance(lock, str) else lock.to_json())
    for node in proto.graph.node:
        if node.name in (marks or {}):
            node.metadata_props.add(key=KERNEL_KEY, value=(marks or {})[node.name])
    return models.save(proto, folder)


def plan(path: Path, **stated: Any) -> xrt.Plan:
    return xrt.plan(path, device="cpu", **stated)


class TestPolicy:
    def test_it_holds_where_none_is_stated(self, tmp_path: Path) -> None:
        with xrt.InferenceSession(write(tmp_path), device="cpu", engine="onnxruntime") as session:
            assert session.policy.kernels.matmul == "cpu.blas"
            assert session.plan.policy_source == "model metadata"
            assert "policy: from model metadata" in str(session.plan)
            report = session.explain(X, runs=1)
        assert report.plan["policy_source"] == "model metadata"
        assert any("source: model metadata" in note for note in report.notes)
        seen = {observation.key: observation for observation in report.observations}
        assert seen["kernels.matmul"].status == "honoured"
        assert seen["kernels.matmul"].observed == "cpu.blas (2 nodes)"

    def test_a_stated_one_replaces_it(self, tmp_path: Path) -> None:
        made = plan(write(tmp_path), policy={"mode": "auto"})
        assert made.policy_source == "stated"
        assert made.control("kernels.matmul") is None
        assert any("carries a policy of its own, which the stated one replaces" in note for note in made.notes)

    def test_kernels_and_execution_are_replaced_alone(self, tmp_path: Path) -> None:
        own = xrt.Policy(kernels={"matmul": "cpu.blas"}, execution={"threads": 1})
        path = write(tmp_path, own)
        made = plan(path, kernel_policy=xrt.KernelPolicy(matmul="cpu.reference"))
        assert made.policy["kernels"]["matmul"] == "cpu.reference"
        assert made.policy["execution"]["threads"] == 1
        assert any("kernel_policy replaces the kernels" in note for note in made.notes)
        made = plan(path, exec_policy=xrt.ExecutionPolicy(threads=2))
        assert made.policy["kernels"]["matmul"] == "cpu.blas"
        assert made.policy["execution"]["threads"] == 2
        assert any("exec_policy replaces the execution section" in note for note in made.notes)

    def test_a_model_without_one(self, tmp_path: Path) -> None:
        path = write(tmp_path, None)
        assert xrt.plan(path).policy_source == "default"
        assert plan(path).policy_source == "stated"

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "not valid JSON"), ('{"kernels": {"matmul": "fastest"}}', "fastest"), ('{"colour": 1}', "colour")],
    )
    def test_what_is_no_policy_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = write(tmp_path, text)
        with pytest.raises(xrt.ModelError, match=rf"the policy that it carries.*{message}.*state a policy"):
            plan(path)
        assert plan(path, policy={}).policy_source == "stated"

    def test_strict_is_held_to(self, tmp_path: Path) -> None:
        path = write(tmp_path, xrt.Policy(mode="strict", kernels={"attention": "flash_v2", "matmul": "torch"}))
        with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.attention"):
            plan(path, engine="onnxruntime")

    def test_a_model_does_not_say_where_files_are(self, tmp_path: Path) -> None:
        execution = {
            "artifacts": {"cache": str(tmp_path / "cache"), "stale": "rebuild"},
            "provider_options": {"tensorrt": {"timing_cache": "/etc/cache", "tactic_sources": "CUBLAS"}},
        }
        path = write(tmp_path, xrt.Policy(execution=execution))
        made = plan(path, engine="onnxruntime")
        assert made.policy["execution"]["artifacts"] == {"stale": "rebuild"}
        assert made.policy["execution"]["provider_options"] == {"tensorrt": {"tactic_sources": "CUBLAS"}}
        told = "\n".join(made.notes)
        assert "execution.artifacts.cache of the model's own policy is left out" in told
        assert "execution.provider_options.tensorrt.timing_cache of the model's own policy is left out" in told


class TestMarks:
    def test_a_mark_is_a_rule_before_the_policy(self, tmp_path: Path) -> None:
        path = write(tmp_path, marks={"mm2": "cpu.reference, auto"})
        with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
            report = session.explain(X, runs=1)
        kernels = {unit.id: unit.kernel for unit in report.units if unit.op == "MatMul"}
        assert kernels == {"mm1": "cpu.blas", "mm2": "cpu.reference"}

    def test_marks_alone_are_a_policy(self, tmp_path: Path) -> None:
        made = plan(write(tmp_path, None, marks={"mm1": "cpu.blas"}))
        assert made.policy_source == "model metadata"
        assert made.control("kernels.rules[0]") is not None

    def test_a_mark_that_says_what_the_policy_says(self) -> None:
        policy = xrt.Policy(kernels={"rules": [{"match": {"node": "a/*"}, "use": "cpu.blas"}]})
        assert read_policy(policy.dumps("json"), [("a/MatMul", "MatMul", "cpu.blas")], "m") == policy

    def test_a_mark_that_names_no_kernel(self, tmp_path: Path) -> None:
        with pytest.raises(xrt.ModelError, match="fastest"):
            plan(write(tmp_path, None, marks={"mm1": "fastest"}))

    @pytest.mark.parametrize(
        ("match", "pinned"),
        [
            ({"module": "a.*"}, True),
            ({"module": "a"}, False),
            ({"node": "a.b/*", "op": "matmul"}, True),
            ({"node": "a.b/*", "op": "conv"}, False),
            ({"op": "matmul", "m": "<=4"}, False),
            ({"op": "matmul", "dtype": "fp16"}, False),
            ({"op": "matmul", "phase": "backward"}, False),
            ({"op": "matmul", "phase": ["infer", "train"]}, True),
        ],
    )
    def test_what_a_rule_pins(self, match: dict[str, Any], pinned: bool) -> None:
        policy = xrt.KernelPolicy(rules=[{"match": match, "use": "cpu.reference"}])
        assert pinned_by_rule(policy, "MatMul", "a.b/MatMul") == (("cpu.reference",) if pinned else None)
        assert pinned_by_rule(policy, "Add", "a.b/Add") is None

    def test_a_free_choice_pins_nothing(self) -> None:
        policy = xrt.KernelPolicy(
            rules=[{"match": {"module": "a"}, "use": "auto"}, {"match": {"op": "matmul"}, "use": "cpu.blas"}]
        )
        assert pinned_by_rule(policy, "MatMul", "a/MatMul") is None
        assert pinned_by_rule(policy, "MatMul", "b/MatMul") == ("cpu.blas",)


class TestLock:
    def test_it_is_told(self, tmp_path: Path) -> None:
        proto = models.mlp()
        made = plan(write(tmp_path, None, lock_for(proto), proto=proto))
        assert made.warnings == ()
        assert any("exported by torch 2.13.0" in note for note in made.notes)

    def test_other_weights_are_told(self, tmp_path: Path) -> None:
        lock = lock_for(models.mlp(seed=1))
        made = plan(write(tmp_path, OURS, lock, proto=models.mlp(seed=2)))
        assert any("other weights than those that were exported" in line for line in made.warnings)
        with pytest.warns(xrt.XpuRuntimeWarning, match="other weights"):
            xrt.InferenceSession(tmp_path / "model.onnx", device="cpu", policy={"mode": "prefer"}).close()
        with pytest.raises(xrt.LockError, match="other weights"):
            plan(tmp_path / "model.onnx", policy={"mode": "strict"})

    @pytest.mark.parametrize("text", ["{", '{"schema": "x"}', None])
    def test_one_that_cannot_be_read(self, tmp_path: Path, text: str | None) -> None:
        proto = models.mlp()
        lock = text or lock_for(proto).to_json().replace("xpuruntime.lock/1", "xpuruntime.lock/9")
        path = write(tmp_path, None, lock, proto=proto)
        assert any("lock" in line for line in plan(path).warnings)
        with pytest.raises(xrt.LockError, match="lock"):
            plan(path, policy={"mode": "strict"})

    def test_one_of_an_earlier_release_is_read(self) -> None:
        text = (
            '{"torch":"2.13.0","xpuruntime":"0.1.0","exporter":"torch.export","opset":0,"weights":"sha256:00",'
            '"device":"cpu","device_name":"","arch":"","kernels":[{"op":"matmul","dtype":"fp32","kernel":"cpu.blas",'
            '"module":"fc"}],"schema":"xpuruntime.export/1"}'
        )
        old = ExportLock.from_json(text, "m")
        assert (old.torch, old.kernels[0].kernel, old.kernels[0].module) == ("2.13.0", "cpu.blas", "fc")
        assert ExportLock.from_json(old.to_json(), "m") == old

    def test_weights_elsewhere_are_not_compared(self, tmp_path: Path) -> None:
        proto = models.mlp()
        proto.metadata_props.add(key=LOCK_KEY, value=lock_for(proto).to_json())
        onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        made = plan(tmp_path / "m.onnx")
        assert any("they are in other files" in note for note in made.notes)

    @pytest.mark.parametrize(
        ("kernel", "arch", "note"),
        [
            ("cpu.blas", "", "2 units ran the kernels that the lock has"),
            ("cpu.reference@x=1", "", r"other kernels than in the lock: mm1 \(matmul\) ran cpu.blas.*cpu.reference"),
            ("cpu.blas", "sm90", "are not compared"),
        ],
    )
    def test_kernels_are_compared(self, tmp_path: Path, kernel: str, arch: str, note: str) -> None:
        import re

        proto = models.mlp()
        kernels = (CallEntry(op="matmul", dtype="fp32", kernel=kernel),)
        device = "cuda:0" if arch else "cpu"
        path = write(tmp_path, OURS, lock_for(proto, kernels=kernels, arch=arch, device=device), proto=proto)
        with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
            notes = session.explain(X, runs=1).notes
        assert any(re.search(note, one) for one in notes), notes


GPU = gpu(name="GPU", total_memory=1 << 34, sm_count=80)
TENSORRT = EngineFacts(
    name="tensorrt",
    version="10.9.0.34",
    loadable=True,
    providers=("cuda",),
    detail={"capabilities": "weak_typing timing_cache tactic_pinning", "compute_capabilities": ""},
)
OPENVINO = EngineFacts(name="openvino", version="2026.4.1", loadable=True, providers=("CPU",))
QNN = EngineFacts(
    name="qnn",
    version="2.7.0",
    loadable=True,
    providers=("QNNExecutionProvider",),
    detail={"sdk": "2.51.0", "runs_on": "simulator"},
)


@pytest.mark.parametrize(
    ("engine", "device", "facts", "execution"),
    [
        ("tensorrt", "cuda:0", TENSORRT, {}),
        ("openvino", "cpu", OPENVINO, {}),
        ("qnn", "npu", QNN, {"provider_options": {"qnn": {"soc_model": "57"}}}),
    ],
)
def test_engines_with_kernels_of_their_own_say_so(
    tmp_path: Path, engine: str, device: str, facts: EngineFacts, execution: dict[str, Any]
) -> None:
    kernels = {"matmul": "cpu.blas", "rules": [{"match": {"node": "mm1"}, "use": "cpu.reference"}]}
    own = xrt.Policy(kernels=kernels, execution=execution)
    path = write(tmp_path, own, marks={"mm1": "cpu.reference"}, proto=models.mlp(batch=2))
    where = machine(python="3.11", cuda=(GPU,), core_cuda=True, engines={engine: facts})
    made = xrt.plan(path, device=device, engine=engine, machine=where)
    assert made.policy_source == "model metadata"
    for key in ("kernels.matmul", "kernels.rules[0]"):
        control = made.control(key)
        assert control is not None
        assert control.enforceability in ("advisory", "unsupported")
        assert any(key in line for line in made.warnings)


class TestIntermediates:
    def test_tensors_inside(self, tmp_path: Path) -> None:
        proto = models.mlp()
        weights = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
        path = write(tmp_path, None, proto=proto)
        with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
            intermediates = session.intermediates(X, ["r", "h", "y"])
            assert list(intermediates) == ["r", "h", "y"]
            np.testing.assert_allclose(intermediates["h"], X["x"] @ weights["w1"], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(intermediates["r"], np.maximum(intermediates["h"], 0))
            np.testing.assert_allclose(intermediates["y"], session.run(X)["y"], rtol=1e-5, atol=1e-6)
            with pytest.raises(xrt.InputError, match=r"no node of .* makes a tensor 'hh'; did you mean 'h'"):
                session.intermediates(X, ["hh"])

    def test_under_the_same_kernels(self, tmp_path: Path) -> None:
        with xrt.InferenceSession(write(tmp_path), device="cpu", engine="onnxruntime") as session:
            xrt.clear_decisions()
            session.intermediates(X, ["h"])
            assert {decision.node: decision.chosen for decision in xrt.decisions()} == {
                "mm1": "cpu.blas",
                "mm2": "cpu.blas",
            }

    def test_a_compiled_model_has_none(self, tmp_path: Path) -> None:
        path = write(tmp_path, None)
        xrt.compile_model(path, tmp_path / "m.xrt", device="cpu", engine="onnxruntime")
        with (
            xrt.InferenceSession(tmp_path / "m.xrt") as session,
            pytest.raises(xrt.UnsupportedOperationError, match="compiled"),
        ):
            session.intermediates(X, ["h"])
