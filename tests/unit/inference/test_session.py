# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`InferenceSession` as users call it: arguments, bad files, bad devices, other frameworks, use after close."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
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


def test_words_of_the_seeds_work(mlp: Path) -> None:
    """`backend=` is `engine=`, `onnxrt` and `ort` are `onnxruntime`, `fp16=True` is `precision="fp16"`."""
    for arguments in ({"backend": "onnxrt"}, {"engine": "ort"}, {"engine": ["ort", "null"]}):
        assert xrt.plan(mlp, device="cpu", **arguments).engine == "onnxruntime"  # type: ignore[arg-type]
    assert xrt.plan(mlp, device="cpu", fp16=True).precision == "fp16"
    policy = xrt.ExecutionPolicy(precision="fp32", device="cpu")
    assert xrt.plan(mlp, exec_policy=policy, kernel_policy=xrt.KernelPolicy(matmul="auto")).precision == "fp32"


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


def test_unknown_engine_names_the_nearest(mlp: Path) -> None:
    with pytest.raises(xrt.XpuRuntimeError, match="onnxruntime"):
        xrt.InferenceSession(mlp, engine="onnxruntim")


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


@pytest.mark.parametrize(
    "content", [b"", b"\x89PNG\r\n\x1a\n" + b"0" * 64, b"{}", os.urandom(999)], ids=["empty", "png", "json", "noise"]
)
def test_files_that_are_no_models(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(xrt.ModelError, match=r"model\.onnx"):
        xrt.InferenceSession(path, device="cpu")


def test_missing_truncated_and_folder(mlp: Path, tmp_path: Path) -> None:
    with pytest.raises(xrt.ModelError, match=r"nothing\.onnx"):
        xrt.InferenceSession(tmp_path / "nothing.onnx")
    with pytest.raises(xrt.ModelError):
        xrt.InferenceSession(tmp_path)
    data = mlp.read_bytes()
    for size in (10, len(data) // 2, len(data) - 1):
        mlp.write_bytes(data[:size])
        with pytest.raises(xrt.ModelError):
            xrt.InferenceSession(mlp, device="cpu")


def test_external_data_missing_or_outside(tmp_path: Path) -> None:
    path = models.save(models.mlp(), tmp_path, external=True)
    data = tmp_path / "model.onnx.data"
    kept = data.read_bytes()
    data.unlink()
    with pytest.raises(xrt.ModelError, match=r"model\.onnx\.data"):
        xrt.InferenceSession(path, device="cpu")
    data.write_bytes(kept[:100])
    with pytest.raises(xrt.ModelError, match=r"model\.onnx\.data"):
        xrt.InferenceSession(path, device="cpu")
    data.unlink()
    outside = tmp_path.parent / "outside.data"
    outside.write_bytes(kept)
    data.symlink_to(outside)
    with pytest.raises(xrt.ModelError, match="outside"):
        xrt.InferenceSession(path, device="cpu")


def test_unknown_operator(tmp_path: Path) -> None:
    model = models.mlp()
    model.graph.node[1].domain = "my.domain"
    model.graph.node[1].op_type = "Mystery"
    model.opset_import.add(domain="my.domain", version=1)
    path = models.save(model, tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"my\.domain: Mystery"):
        xrt.InferenceSession(path, device="cpu")


def test_strings(tmp_path: Path) -> None:
    path = models.save(models.identity("string"), tmp_path)
    words = np.array([["a", "b", "ß"]], dtype=object)
    with xrt.InferenceSession(path, device="cpu") as session:
        assert session.run({"x": words})["y"].tolist() == words.tolist()
        assert session.run({"x": words.astype("U1")})["y"].tolist() == words.tolist()
        with pytest.raises(xrt.InputError, match="no fixed buffer"):
            session.bind({"x": (1, 3)})


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


def test_bfloat16(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path = models.save(models.identity("bfloat16"), tmp_path)
    x = np.array([[1.5, -2.0, 3.0]], ml_dtypes.bfloat16)
    with xrt.InferenceSession(path, device="cpu") as session:
        y = session.run({"x": x})["y"]
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32))


def test_our_tensors(mlp: Path) -> None:
    with xrt.InferenceSession(mlp, device="cpu") as session:
        y = session.run({"x": xrt.Tensor.from_numpy(X)})["y"]
        assert isinstance(y, xrt.Tensor)
        np.testing.assert_array_equal(y.numpy(), session.run({"x": X})["y"])


@pytest.mark.torch
def test_torch_on_the_cpu(mlp: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 64)
    with xrt.InferenceSession(mlp, device="cpu") as session:
        y = session.run({"x": x})["y"]
        assert isinstance(y, torch.Tensor)
        np.testing.assert_array_equal(y.numpy(), session.run({"x": X})["y"])
        with pytest.raises(xrt.InputError, match="requires grad"):
            session.run({"x": torch.ones(2, 64, requires_grad=True)})
        with pytest.raises(xrt.InputError, match="float16"):
            session.run({"x": x.half()})


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


def test_failure_while_running_is_ours(tmp_path: Path) -> None:
    """An index out of range inside the model is the engine's error, with the node named."""
    from onnx import TensorProto, helper

    node = helper.make_node("Gather", ["x", "i"], ["y"], name="pick")
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [3]),
        helper.make_tensor_value_info("i", TensorProto.INT64, [1]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    graph = helper.make_graph([node], "gather", inputs, outputs)
    path = models.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path)
    with xrt.InferenceSession(path, device="cpu") as session:
        with pytest.raises(xrt.XpuRuntimeError, match="pick"):
            session.run({"x": np.zeros(3, np.float32), "i": np.array([7])})
        assert session.run({"x": np.zeros(3, np.float32), "i": np.array([2])})["y"].shape == (1,)


def test_accuracy_of_the_policy_is_held(mlp: Path) -> None:
    """A tolerance that fp16 cannot meet refuses the session; a wide one passes and is noted."""
    execution = {"device": "cpu", "precision": "fp16"}
    tight = {"execution": execution, "accuracy": {"rtol": 1e-9, "atol": 1e-12}}
    with pytest.warns(xrt.XpuRuntimeWarning), pytest.raises(xrt.EngineError, match="out of tolerance"):
        xrt.InferenceSession(mlp, policy=tight)
    with pytest.warns(xrt.XpuRuntimeWarning):
        session = xrt.InferenceSession(mlp, policy={"execution": execution, "accuracy": {"rtol": 0.1}})
    assert any("probe input" in c.what for c in session.explain(runs=1).conversions)
    session.close()


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


def test_policy_travels_as_a_file(mlp: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    xrt.Policy(execution=xrt.ExecutionPolicy(device="cpu", precision="fp32")).save(path)
    with xrt.InferenceSession(mlp, policy=path) as session:
        assert session.policy == xrt.Policy.load(path)
        assert session.plan.precision == "fp32"


def test_two_processes_at_once(mlp: Path) -> None:
    code = (
        "import sys, numpy as np, xpuruntime as xrt\n"
        "with xrt.InferenceSession(sys.argv[1], device='cpu') as s:\n"
        "    r = s.explain({'x': np.ones((2, 64), np.float32)}, runs=2)\n"
        "    print(r.headline)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code, str(mlp)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["policy honoured"] * 2


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
