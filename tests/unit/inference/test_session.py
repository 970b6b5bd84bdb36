# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`InferenceSession` as users call it: arguments, bad files, bad devices, other frameworks, use after close."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import machines
import msgspec
import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.errors import PolicyError
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

X = np.ones((2, 64), np.float32)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return models.save(models.mlp(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "onnxruntime", "backend": "null"}, "contradict"),
        ({"fp16": True, "precision": "fp32"}, "contradict"),
        ({"device": "cudda:0"}, "cuda"),
        ({"device": "cuda:-1"}, "cuda:-1"),
        ({"policy": {"kernals": {}}}, "did you mean 'kernels'"),
        ({"policy": "no-such-policy.yaml"}, "no-such-policy.yaml"),
        ({"precision": "fp17"}, "fp16"),
    ],
)
def test_bad_arguments(mlp: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(xrt.PolicyError, match=message):
        xrt.InferenceSession(mlp, **arguments)


def test_engine_that_is_not_here_names_the_extra(mlp: Path) -> None:
    bare = msgspec.structs.replace(machine_snapshot(), engines={})
    with pytest.raises(xrt.EngineError, match=r"xpuruntime\[openvino\]"):
        xrt.InferenceSession(mlp, engine="openvino", device="npu", machine=bare)


@pytest.mark.skipif(xrt.get_device_count("cuda") > 0, reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda:0", "cuda:99"])
def test_no_gpu(mlp: Path, device: str) -> None:
    with pytest.raises(xrt.CudaError, match=device) as caught:
        xrt.InferenceSession(mlp, device=device)
    assert "cpu" in str(caught.value)


def test_bytes_are_strings_in_utf8(tmp_path: Path) -> None:
    path = models.save(models.identity("string"), tmp_path)
    words = np.array([["a", "", "날씨"]], dtype=object)
    encoded = np.array([[one.encode() for one in words[0]]], dtype=object)
    with xrt.InferenceSession(path, device="cpu") as session:
        assert session.run({"x": encoded})["y"].tolist() == words.tolist()
        assert session.run({"x": encoded.astype("S")})["y"].tolist() == words.tolist()
        assert encoded[0, 0] == b"a", "the caller's array is as it was"
        encoded[0, 1] = b"a\xff"
        with pytest.raises(
            xrt.InputError, match=r"'x' has bytes that are not UTF-8 text: .* at byte 1\. Fix: pass str"
        ):
            session.run({"x": encoded})


def test_out_of_memory_is_a_memory_error_and_the_session_lives(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    node = helper.make_node("Expand", ["x", "shape"], ["y"], name="expand")
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("shape", TensorProto.INT64, [1]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M"])]
    graph = helper.make_graph([node], "expand", inputs, outputs)
    path = models.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path)
    x = np.ones(1, np.float32)
    with xrt.InferenceSession(path, device="cpu") as session:
        with pytest.raises(MemoryError) as caught:
            session.run({"x": x, "shape": np.array([1 << 46])})
        assert isinstance(caught.value, xrt.OutOfMemoryError)
        assert caught.value.engine == "onnxruntime"
        assert session.run({"x": x, "shape": np.array([3])})["y"].shape == (3,)


def test_fp16_asked_and_fp32_run_is_caught(mlp: Path) -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match="fp16 is advisory"):
        session = xrt.InferenceSession(mlp, device="cpu", fp16=True)
    report = session.explain(runs=1)
    session.close()
    assert not report.honoured
    assert "1 deviation" in report.headline
    statuses = {o.key: o.status for o in report.observations}
    assert statuses["execution.precision"] == "substituted"


def test_provider_options_are_checked(mlp: Path) -> None:
    def options(**given: Any) -> dict[str, Any]:
        return {"execution": {"device": "cpu", "provider_options": {"onnxruntime": given}}}

    with pytest.raises(xrt.XpuRuntimeError, match=r"unknown option 'use_areena'; did you mean 'use_arena'"):
        xrt.InferenceSession(mlp, policy=options(use_areena=1))
    with pytest.raises(xrt.XpuRuntimeError, match=r"session\.force_spining_stop"):
        xrt.InferenceSession(mlp, policy=options(**{"session.force_spining_stop": "1"}))
    with pytest.raises(xrt.XpuRuntimeError, match="'2' is not one of"):
        xrt.InferenceSession(mlp, policy=options(**{"session.disable_prepacking": 2}))
    with xrt.InferenceSession(mlp, policy=options(**{"session.disable_prepacking": True})) as session:
        report = session.explain(runs=1)
    key = "execution.provider_options.onnxruntime.session.disable_prepacking"
    assert {o.key: o.status for o in report.observations}[key] == "honoured", report


def test_strict_honoured_policy(mlp: Path) -> None:
    """A policy that can be enforced passes under strict, and its report has no deviations."""
    policy = {
        "mode": "strict",
        "execution": {"engine": "onnxruntime", "device": "cpu", "precision": "fp32", "threads": 1},
    }
    with xrt.InferenceSession(mlp, policy=policy) as session:
        report = session.explain({"x": X}, runs=2)
    assert report.honoured, report
    assert report.headline == "policy honoured"
    assert {o.key: o.status for o in report.observations}["execution.threads"] == "honoured"
    json.loads(report.to_json())


def test_plan_loads_nothing(mlp: Path) -> None:
    """Planning does not open a session: a plan for CUDA is made for a machine that is not this one."""
    from xpuruntime.runtime.machine import CpuFacts, EngineFacts

    gpu = machines.gpu(name="some GPU", total_memory=1 << 37)
    facts = EngineFacts(
        name="onnxruntime", version="1.31.1", loadable=True, providers=("CUDAExecutionProvider", "CPUExecutionProvider")
    )
    machine = machines.machine(
        python="3.12", cpu=CpuFacts(name="cpu", cores=8), cuda=(gpu,), core_cuda=True, engines={"onnxruntime": facts}
    )
    plan = xrt.plan(mlp, machine=machine, policy={"execution": {"precision": "fp32"}})
    assert (plan.engine, plan.device) == ("onnxruntime", "cuda:0")
    assert plan.settings["options"]["use_tf32"] == "0"
    assert plan.control("execution.precision").enforceability == "enforced"  # type: ignore[union-attr]
    with pytest.raises(xrt.CudaError, match=r"cuda:99 was not found: this machine has cuda:0"):
        xrt.plan(mlp, device="cuda:99", machine=machine)


def test_nothing_is_left_in_the_folder(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mlp.parent)
    before = sorted(path.name for path in mlp.parent.iterdir())
    with xrt.InferenceSession(mlp, device="cpu") as session:
        session.explain(runs=1)
    assert sorted(path.name for path in mlp.parent.iterdir()) == before


def test_run_is_a_method_whether_or_not_a_session_is_there(mlp: Path) -> None:
    assert list(inspect.signature(xrt.InferenceSession.run).parameters) == ["self", "inputs", "stream", "outputs"]
    with xrt.InferenceSession(mlp, device="cpu") as session:
        assert np.array_equal(xrt.InferenceSession.run(session, {"x": X})["y"], session.run({"x": X})["y"])
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        xrt.InferenceSession.run(session, {"x": X})


def test_repr_and_metadata(mlp: Path) -> None:
    with xrt.InferenceSession(mlp, device="cpu") as session:
        assert "onnxruntime@cpu" in repr(session)
        assert [(i.name, i.dtype, i.shape) for i in session.inputs] == [("x", "float32", ("N", 64))]
        assert [o.name for o in session.outputs] == ["y"]
        with pytest.raises(xrt.InputError, match="runs must be at least 1"):
            session.explain(runs=0)
        with pytest.raises(xrt.InputError, match="stream="):
            session.run({"x": X}, stream=1)


@pytest.mark.parametrize("function", [xrt.InferenceSession, xrt.plan, xrt.compile_model])
def test_only_the_policy_is_taken_by_place(function):
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_place[0] == "model"
    assert by_place[-1] == "policy"
    assert len(by_place) <= 3


def test_aliases_say_the_same_as_the_policy():
    execution, kernels = xrt.ExecutionPolicy(device="cpu", engine="onnxruntime"), xrt.KernelPolicy(matmul="auto")
    stated = xrt.plan(xrt.demo_model_path(), xrt.Policy(execution=execution, kernels=kernels))
    assert xrt.plan(xrt.demo_model_path(), exec_policy=execution, kernel_policy=kernels).policy == stated.policy
    assert xrt.plan(xrt.demo_model_path(), device="cpu", backend="onnxruntime").engine == "onnxruntime"


def test_a_device_in_the_place_of_the_policy_is_told_apart():
    with pytest.raises(PolicyError, match=r"'cuda:0' is a device, not a file. Fix: device='cuda:0'"):
        xrt.plan(xrt.demo_model_path(), "cuda:0")


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'fp17'"):
        xrt.plan(xrt.demo_model_path(), fp17=True)
    with pytest.raises(TypeError, match="no argument 'fp17'"):
        xrt.InferenceSession(xrt.demo_model_path(), fp17=True)
