# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pass-through providers of ONNX Runtime, planned on machines stated as facts: none of them runs here."""

from __future__ import annotations

from typing import Any

import machines
import pytest

import xpuruntime as xrt
from xpuruntime.demo import demo_model_path
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.model_source import ModelSource
from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine
from xpuruntime.engines.onnxruntime.opening import open_session, session_options
from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
from xpuruntime.engines.onnxruntime.pass_through import PASS_THROUGH
from xpuruntime.errors import EngineError, PolicyError, UnsupportedOperationError
from xpuruntime.planning import Plan, PlanRequest, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import CpuFacts, EngineFacts, Machine

MODEL = inspect_model(demo_model_path())
ENGINES = {"onnxruntime": OnnxRuntimeEngine()}


def machine(system: str, wheel: str, *providers: str) -> Machine:
    facts = EngineFacts(
        name="onnxruntime",
        version="1.24.4",
        loadable=True,
        providers=(*providers, "CPUExecutionProvider"),
        detail={"wheel": f"{wheel} 1.24.4"},
    )
    cpu = CpuFacts(name="cpu", cores=8)
    return machines.machine(system=system, cpu=cpu, engines={"onnxruntime": facts})


AMD = machine("Linux", "onnxruntime-migraphx", "MIGraphXExecutionProvider")
MAC = machine("Darwin", "onnxruntime", "CoreMLExecutionProvider")
WINDOWS = machine("Windows", "onnxruntime-directml", "DmlExecutionProvider")
HAVE = {"rocm": AMD, "metal": MAC, "dml": WINDOWS}


def settle(where: Machine, device: str, policy: dict[str, Any] | None = None, **execution: Any) -> Plan:
    stated = {"execution": {"device": device, **execution}, **(policy or {})}
    return resolve(PlanRequest(model=MODEL), Policy.coerce(stated), where, ENGINES)


def options(**given: Any) -> dict[str, Any]:
    return {"provider_options": {"onnxruntime": given}}


@pytest.mark.parametrize(
    ("device", "asked", "provider", "told"),
    [
        ("rocm:0", "rocm", "MIGraphXExecutionProvider", {"device_id": "0"}),
        ("rocm:3", "rocm:3", "MIGraphXExecutionProvider", {"device_id": "3"}),
        ("metal", "metal", "CoreMLExecutionProvider", {"MLComputeUnits": "CPUAndGPU"}),
        ("dml:0", "dml", "DmlExecutionProvider", {"device_id": "0"}),
        ("dml:1", "dml:1", "DmlExecutionProvider", {"device_id": "1"}),
    ],
)
def test_each_device_is_a_provider(device: str, asked: str, provider: str, told: dict[str, str]) -> None:
    plan = settle(HAVE[asked.partition(":")[0]], asked)
    assert plan.candidate == f"onnxruntime@{device}"
    assert plan.settings["provider"] == provider
    assert plan.settings["options"] == told
    assert provider in plan.accepted.reason


@pytest.mark.parametrize("kind", ["rocm", "metal", "dml"])
def test_auto_never_chooses_what_was_never_run(kind: str) -> None:
    assert settle(HAVE[kind], "auto").candidate == "onnxruntime@cpu"


@pytest.mark.parametrize(
    ("where", "device", "words", "fix"),
    [
        (
            machine("Linux", "onnxruntime-gpu", "CUDAExecutionProvider"),
            "rocm:0",
            "device rocm:0 needs MIGraphXExecutionProvider, which the onnxruntime-gpu 1.24.4 wheel does not have",
            "pip uninstall -y onnxruntime-gpu && pip install --force-reinstall onnxruntime-migraphx",
        ),
        (
            machine("Windows", "onnxruntime"),
            "dml",
            "device dml:0 needs DmlExecutionProvider, which the onnxruntime 1.24.4 wheel does not have",
            "pip uninstall -y onnxruntime && pip install --force-reinstall onnxruntime-directml",
        ),
        (
            machine("Darwin", "onnxruntime-migraphx"),
            "metal",
            "device metal needs CoreMLExecutionProvider",
            "pip uninstall -y onnxruntime-migraphx && pip install --force-reinstall onnxruntime",
        ),
    ],
)
def test_a_wheel_without_the_provider_names_the_one_that_has_it(
    where: Machine, device: str, words: str, fix: str
) -> None:
    with pytest.raises(EngineError) as error:
        settle(where, device)
    assert words in str(error.value)
    assert fix in str(error.value)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (
            "metal",
            "Core ML is there on macOS only, and this machine runs Linux. Fix: use device cpu, or onnxruntime on",
        ),
        ("dml", "DirectML is there on Windows only, and this machine runs Linux"),
    ],
)
def test_another_system_is_said(device: str, words: str) -> None:
    with pytest.raises(UnsupportedOperationError) as error:
        settle(AMD, device)
    assert words in str(error.value)


def test_this_computer_is_planned_without_touching_a_device() -> None:
    for kind, known in PASS_THROUGH.items():
        with pytest.raises(
            (EngineError, UnsupportedOperationError), match=f"which the .* wheel does not have.*{known.wheel}"
        ):
            xrt.plan(demo_model_path(), device=kind, engine="onnxruntime")


@pytest.mark.parametrize(
    ("device", "given", "told"),
    [
        ("rocm", {"migraphx_exhaustive_tune": True}, {"migraphx_exhaustive_tune": "1"}),
        ("rocm", {"migraphx_model_cache_dir": "/tmp/m"}, {"migraphx_model_cache_dir": "/tmp/m"}),
        ("metal", {"MLComputeUnits": "ALL", "EnableOnSubgraphs": True}, {"MLComputeUnits": "ALL"}),
        ("metal", {"ModelFormat": "MLProgram"}, {"ModelFormat": "MLProgram", "MLComputeUnits": "CPUAndGPU"}),
        ("dml", {"disable_metacommands": True}, {"disable_metacommands": "true", "device_id": "0"}),
        ("dml", {"disable_metacommands": "false"}, {"disable_metacommands": "false"}),
    ],
)
def test_options_become_the_vendors_words(device: str, given: dict[str, Any], told: dict[str, str]) -> None:
    plan = settle(HAVE[device], device, **options(**given))
    assert told.items() <= plan.settings["options"].items()
    for name in given:
        control = plan.control(f"execution.provider_options.onnxruntime.{name}")
        assert control is not None


def test_session_entries_of_directml_are_its_own() -> None:
    given = options(**{"ep.dml.enable_graph_capture": True, "session.disable_prepacking": True})
    plan = settle(WINDOWS, "dml", **given)
    assert plan.settings["session"] == {"ep.dml.enable_graph_capture": "1", "session.disable_prepacking": "1"}
    with pytest.raises(PolicyError, match=r"unknown option 'ep\.dml\.enable_graph_capture'"):
        settle(AMD, "rocm", **options(**{"ep.dml.enable_graph_capture": True}))


@pytest.mark.parametrize(
    ("device", "given", "message"),
    [
        ("rocm", {"migraphx_exhaustive_tun": 1}, "did you mean 'migraphx_exhaustive_tune'"),
        ("rocm", {"migraphx_fp16_enable": True}, "'migraphx_fp16_enable' is set by execution.precision"),
        ("rocm", {"migraphx_mem_limit": 1}, "'migraphx_mem_limit' is set by execution.memory.limit"),
        ("rocm", {"device_id": 1}, "'device_id' is set by execution.device"),
        ("rocm", {"migraphx_model_cache_dir": " "}, "' ' is not text"),
        ("rocm", {"migraphx_model_cache_dir": True}, "'1' is not text"),
        ("rocm", {"use_tf32": 1}, "unknown option 'use_tf32'"),
        ("metal", {"MLComputeUnits": "CPUOnly"}, "'CPUOnly' is not one of 'CPUAndGPU', 'ALL'"),
        ("metal", {"ModelFormat": "mlprogram"}, "'mlprogram' is not one of 'MLProgram', 'NeuralNetwork'"),
        ("dml", {"performance_preference": "default"}, "is set by execution.device, which names one adapter"),
        ("dml", {"disable_metacommands": "yes"}, "'yes' is not one of 'false', 'true'"),
    ],
)
def test_options_that_are_refused(device: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as error:
        settle(HAVE[device], device, **options(**given))
    assert message in str(error.value)


@pytest.mark.parametrize("device", ["rocm", "metal", "dml"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "int8"])
def test_precisions_that_nothing_makes(device: str, precision: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=f"no model is made {precision} for"):
        settle(HAVE[device], device, precision=precision)


def test_what_each_key_becomes() -> None:
    plan = settle(
        AMD,
        "rocm",
        precision="fp16",
        threads=2,
        determinism="run_to_run",
        memory={"limit": "1GiB"},
        allow_cpu_ops=["Shape"],
        cuda_graph="prefer",
        shapes={"image": [4, 1, 8, 8]},
    )
    levels = {control.key: control.enforceability for control in plan.controls}
    assert levels == {
        "execution.device": "enforced",
        "execution.precision": "advisory",
        "execution.threads": "enforced",
        "execution.determinism": "advisory",
        "execution.memory.limit": "advisory",
        "execution.allow_cpu_ops": "enforced",
        "execution.cuda_graph": "unsupported",
        "execution.shapes.image": "enforced",
    }
    assert plan.settings["convert"] == "fp16"
    assert tuple(plan.settings["allow_cpu_ops"]) == ("Shape",)
    assert plan.settings["options"]["migraphx_mem_limit"] == str(1 << 30)
    assert any("which was never tested" in line for line in plan.warnings)


def test_core_ml_cannot_be_vouched_for_inside() -> None:
    plan = settle(MAC, "metal", precision="fp32")
    device = plan.control("execution.device")
    assert device is not None
    assert device.enforceability == "advisory"
    assert plan.settings["options"]["ModelFormat"] == "MLProgram"
    with pytest.raises(UnsupportedOperationError, match=r"execution\.device"):
        settle(MAC, "metal", {"mode": "strict"})
    assert settle(WINDOWS, "dml", {"mode": "strict"}).candidate == "onnxruntime@dml:0"


@pytest.mark.parametrize("kind", ["rocm", "metal", "dml"])
def test_nothing_is_compiled_for_them(kind: str) -> None:
    with pytest.raises(UnsupportedOperationError, match="no compiled model is made for"):
        settle(HAVE[kind], kind, artifacts={"cache": "default"})
    policy = Policy.coerce({"execution": {"device": kind}})
    with pytest.raises(UnsupportedOperationError, match="no compiled model is made for"):
        resolve(PlanRequest(model=MODEL, purpose="compile"), policy, HAVE[kind], ENGINES)


@pytest.mark.parametrize("known", PASS_THROUGH.values(), ids=list(PASS_THROUGH))
@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_a_provider_that_does_not_open_never_becomes_the_cpu(known: Any) -> None:
    """This wheel has none of them, so this is what really happens when one is asked of it."""
    source = ModelSource(str(demo_model_path()), None, "the demo")
    with pytest.raises(EngineError, match=f"asked for {known.provider}, but ONNX Runtime opened the session on CPU"):
        open_session(OnnxRuntimeSettings(provider=known.provider, options={"device_id": "0"}), source, "rocm:0")


def test_directml_is_opened_without_memory_patterns() -> None:
    source = ModelSource(str(demo_model_path()), None, "the demo")
    assert session_options(OnnxRuntimeSettings(provider="DmlExecutionProvider"), source).enable_mem_pattern is False
    assert session_options(OnnxRuntimeSettings(provider="CPUExecutionProvider"), source).enable_mem_pattern is True
