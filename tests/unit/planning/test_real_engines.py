# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Planning with the engines of this package, on machines stated as facts."""

from __future__ import annotations

from typing import Any

import machines
import msgspec
import pytest

from xpuruntime.demo import demo_model_path
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import CudaError, EngineError, PolicyError, UnsupportedOperationError
from xpuruntime.planning import Plan, PlanRequest, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts, Machine

CUDA, CPU_EP = "CUDAExecutionProvider", "CPUExecutionProvider"
ORT = EngineFacts(
    name="onnxruntime",
    version="1.31.1",
    loadable=True,
    providers=(CUDA, CPU_EP),
    detail={"wheel": "onnxruntime-gpu 1.31.1", "cuda": "13.0"},
)
BROKEN = msgspec.structs.replace(
    ORT, providers=(CPU_EP,), broken={CUDA: "libcudnn.so.9 not found"}, fix='pip install "xpuruntime[cuda]"'
)
LAPTOP = machines.machine(cuda_reason="no NVIDIA driver was found", engines={"onnxruntime": BROKEN})
H200 = machines.gpu()
SERVER = msgspec.structs.replace(LAPTOP, cuda=(H200,), cuda_reason=None, core_cuda=True, engines={"onnxruntime": ORT})
WITHOUT_CUDNN = msgspec.structs.replace(SERVER, engines={"onnxruntime": BROKEN})
MODEL = inspect_model(demo_model_path())


def settle(machine: Machine, policy: Any = None) -> Plan:
    return resolve(PlanRequest(model=MODEL), Policy.coerce(policy), machine, default_registry().engines())


def test_the_best_device_of_each_machine() -> None:
    assert settle(LAPTOP).candidate == "onnxruntime@cpu"
    assert settle(SERVER).candidate == "onnxruntime@cuda:0"


def test_the_null_engine_runs_only_when_named() -> None:
    assert "null@cpu" not in [verdict.candidate for verdict in settle(LAPTOP).verdicts]
    assert settle(LAPTOP, {"execution": {"engine": "null"}}).candidate == "null@cpu"


def test_a_gpu_that_cannot_be_used_is_said() -> None:
    plan = settle(WITHOUT_CUDNN)
    assert plan.device == "cpu"
    assert "libcudnn.so.9 not found" in plan.rejected[0].reason
    assert any("xpuruntime[cuda]" in line for line in plan.warnings)


@pytest.mark.parametrize(
    ("machine", "device", "error", "text"),
    [
        (LAPTOP, "cuda:0", CudaError, "no NVIDIA driver was found"),
        (SERVER, "cuda:99", CudaError, "this machine has cuda:0"),
        (WITHOUT_CUDNN, "cuda:0", EngineError, "libcudnn.so.9 not found"),
        (SERVER, "npu", UnsupportedOperationError, "npu"),
    ],
)
def test_a_device_that_cannot_be_had(machine: Machine, device: str, error: type[Exception], text: str) -> None:
    for engine in ("auto", "onnxruntime"):
        with pytest.raises(error, match=f"onnxruntime@{device}") as caught:
            settle(machine, {"execution": {"device": device, "engine": engine}})
        assert text in str(caught.value)


@pytest.mark.parametrize("mode", ["strict", "prefer", "auto"])
def test_options_of_a_misspelt_engine_name_the_nearest_one(mode: str) -> None:
    asked = {"engine": "onnxruntime", "device": "cpu", "provider_options": {"openvin": {"num_streams": "1"}}}
    with pytest.raises(PolicyError, match=r"Fix: write execution\.provider_options\.openvino,"):
        settle(LAPTOP, {"mode": mode, "execution": asked})


@pytest.mark.parametrize("engine", ["onnxruntime", "null"])
def test_a_fix_begins_with_what_obeys_the_request(engine: str) -> None:
    """Leaving out what was requested is never the first answer, in plan and error."""
    execution = {"engine": engine, "device": "cpu", "cuda_graph": "require", "tf32": True, "layout": "nhwc"}
    for more in ({}, {"determinism": "batch_invariant"}, {"memory": {"limit": "1GiB", "pool": "caching"}}):
        plan = settle(LAPTOP, {"mode": "auto", "kernels": {"attention": "cpu"}, "execution": {**execution, **more}})
        short = [control for control in plan.controls if control.enforceability != "enforced"]
        assert len(short) >= 3
        for control in short:
            assert control.fix is not None
            assert not control.fix.startswith(("remove", "leave", "drop")), control
        with pytest.raises(UnsupportedOperationError) as caught:
            settle(LAPTOP, {"mode": "strict", "execution": {**execution, **more}})
        assert "Fix: remove" not in str(caught.value)


def test_every_stated_key_has_a_control() -> None:
    policy = Policy.coerce(
        {
            "execution": {
                "device": "cuda:0",
                "precision": "fp32",
                "determinism": "run_to_run",
                "threads": 2,
                "memory": {"pool": "caching", "limit": "1GiB"},
                "provider_options": {"onnxruntime": {"cudnn_conv_use_max_workspace": 1}},
            },
            "kernels": {"matmul": "cublasLt", "rules": [{"match": {"op": "conv"}, "use": "cudnn"}]},
            "accuracy": {"rtol": 0.01},
        }
    )
    plan = settle(SERVER, policy)
    for key in policy.stated():
        assert any(
            control.key in (key, "execution.memory") or key.startswith(control.key) for control in plan.controls
        ), key
    assert all(control.reason for control in plan.controls)


def test_an_engine_whose_package_is_gone() -> None:
    gone = EngineFacts(
        name="onnxruntime", reason="no onnxruntime wheel is installed", fix="pip install onnxruntime-gpu"
    )
    with pytest.raises(EngineError, match="engine_missing: no onnxruntime wheel is installed"):
        settle(msgspec.structs.replace(LAPTOP, engines={"onnxruntime": gone}))
    with pytest.raises(EngineError):
        settle(msgspec.structs.replace(LAPTOP, engines={}))


@pytest.mark.parametrize("device", ["npu", "gpu", "gpu:1", "metal", "dml"])
def test_a_device_of_nobody_has_a_verdict_of_every_engine(device: str) -> None:
    with pytest.raises(UnsupportedOperationError) as error:
        settle(LAPTOP, {"execution": {"device": device}})
    automatic = [engine for engine in default_registry() if engine.automatic and MODEL.format in engine.formats]
    told = str(error.value).splitlines()[1:]
    assert len(told) == len(automatic)
    for engine, line in zip(automatic, told, strict=True):
        assert line.strip().startswith(f"{engine.name}@{device}") or device == "dml", line
        assert " Fix: " in line


def test_a_broken_engine_is_told_as_such_beside_engines_that_never_had_the_device() -> None:
    with pytest.raises(EngineError, match=r"onnxruntime@cuda:0: library_missing: .*libcudnn"):
        settle(WITHOUT_CUDNN, {"execution": {"device": "cuda:0"}})


@pytest.mark.parametrize("engine", ["onnxruntime", "null"])
def test_a_policy_of_training_leaves_the_choice_to_the_engine_of_a_session(engine: str) -> None:
    kernels = {"matmul": "torch", "conv": "auto", "rules": [{"match": {"op": "attention"}, "use": "torch"}]}
    policy = {"mode": "strict", "execution": {"device": "cpu", "engine": engine}, "kernels": kernels}
    plan = settle(LAPTOP, policy)
    controls = {control.key: control for control in plan.controls if control.key.startswith("kernels.")}
    assert set(controls) == {"kernels.matmul", "kernels.conv", "kernels.rules[0]"}
    assert {(control.resolved, control.enforceability) for control in controls.values()} == {
        ("the engine's choice", "enforced")
    }
    assert controls["kernels.matmul"].requested == "torch"
    assert f"{engine} runs without PyTorch" in controls["kernels.matmul"].reason
    assert plan.policy["kernels"] == kernels


def test_torch_at_the_end_of_a_list_leaves_the_choice_to_the_engine() -> None:
    asked = {"execution": {"device": "cpu"}, "kernels": {"matmul": ["cublasLt", "torch"]}, "mode": "strict"}
    found = {control.key: control for control in settle(LAPTOP, asked).controls}["kernels.matmul"]
    assert (found.requested, found.enforceability) == ("[cublasLt, torch]", "enforced")
