# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Settings of engines: immutable values that depend on the request and machine alone, and their controls."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import machines
import msgspec
import pytest
from generation_folders import write_folder

from xpuruntime import engines
from xpuruntime.engines.base import EngineSettings, Judgement, Request
from xpuruntime.engines.control_builder import ControlBuilder
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry, read_model
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import CpuFacts, EngineFacts
from xpuruntime.testing import models

_RTX = "targets runtime_cache graph_strategy kernel_specialization weight_streaming refit tiling runtime_platform"
_FACTS = (
    EngineFacts(
        name="onnxruntime",
        version="1.27.0",
        loadable=True,
        providers=(
            "CPUExecutionProvider",
            "CUDAExecutionProvider",
            "ROCMExecutionProvider",
            "MIGraphXExecutionProvider",
        ),
    ),
    EngineFacts(name="openvino", version="2026.4.1", loadable=True, providers=("CPU", "GPU.0", "NPU")),
    EngineFacts(name="qnn", version="2.7.0", loadable=True, detail={"sdk": "2.51.0", "runs_on": "simulator"}),
    EngineFacts(name="tensorrt", version="10.9.0.34", loadable=True, detail={"capabilities": "timing_cache refit"}),
    EngineFacts(
        name="tensorrt-rtx",
        version="1.7.1.116",
        loadable=True,
        detail={"capabilities": _RTX, "compute_capabilities": "7.5 8.0 8.6 8.9"},
    ),
    EngineFacts(name="torch", version="2.13.0", loadable=True, providers=("cpu", "cuda")),
    EngineFacts(
        name="onnxruntime-genai",
        version="0.18.0",
        loadable=True,
        providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    ),
    EngineFacts(name="openvino-genai", version="2026.4.1", loadable=True, detail={"openvino": "2026.4.1"}),
)
_GPU = machines.gpu(name="GPU", compute_capability=(8, 9), total_memory=1 << 34, sm_count=80)
_MACHINE = machines.machine(
    python="3.11",
    cpu=CpuFacts(name="cpu", cores=4, features=("avx2", "avx512f")),
    cuda=(_GPU,),
    core_cuda=True,
    engines={fact.name: fact for fact in _FACTS},
)
#: Engine and device to what the policy states of the execution there.
_ASKED: dict[tuple[str, str], dict[str, Any]] = {
    ("onnxruntime", "cpu"): {
        "precision": "fp16",
        "threads": 2,
        "provider_options": {"onnxruntime": {"session.intra_op.allow_spinning": "0"}},
    },
    ("onnxruntime", "cuda:0"): {
        "determinism": "run_to_run",
        "memory": {"limit": 1 << 30},
        "cuda_graph": "prefer",
        "layout": "nhwc",
        "tf32": False,
    },
    ("onnxruntime", "rocm:0"): {"precision": "fp16", "threads": 2},
    ("openvino", "cpu"): {"threads": 2, "provider_options": {"openvino": {"ENABLE_CPU_PINNING": True}}},
    ("qnn", "npu"): {"precision": "fp16", "provider_options": {"qnn": {"soc": "sm8650"}}},
    ("tensorrt", "cuda:0"): {"precision": "fp16"},
    ("tensorrt-rtx", "cuda:0"): {"memory": {"pool": "caching", "limit": 1 << 30}},
    ("torch", "cpu"): {"precision": "bf16", "threads": 2},
    ("onnxruntime-genai", "cuda:0"): {"precision": "fp32", "allow_cpu_ops": ["Shape", "Gather"]},
    ("onnxruntime-genai", "cpu"): {
        "threads": 2,
        "provider_options": {"onnxruntime-genai": {"enable_mem_pattern": False}},
    },
    ("openvino-genai", "cpu"): {"threads": 2, "provider_options": {"openvino-genai": {"ATTENTION_BACKEND": "SDPA"}}},
}
_KERNELS = {"rules": [{"match": {"node": "mm*"}, "precision": "fp32"}]}


def _classes() -> list[type[EngineSettings]]:
    """Return the settings class of each engine of the package."""
    for package in pkgutil.iter_modules(engines.__path__):
        folder = Path(engines.__path__[0]) / package.name
        if (folder / "engine.py").exists():
            module = "controls" if (folder / "controls.py").exists() else "engine"
            importlib.import_module(f"{engines.__name__}.{package.name}.{module}")
    own = [kind for kind in EngineSettings.__subclasses__() if kind.__module__.startswith(f"{engines.__name__}.")]
    return sorted(own, key=lambda kind: kind.__module__)


def _request(engine: str, device: str, folder: Path) -> Request:
    if engine == "torch":
        torch = pytest.importorskip("torch")
        from xpuruntime.engines.torch.program.reading import inspect_module

        info = inspect_module(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),))
    elif engine == "onnxruntime-genai":
        info = read_model(write_folder(folder / "decoder"))
    elif engine == "openvino-genai":
        for name in ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml"):
            (folder / name).touch()
        sizes = '{"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 8}'
        (folder / "config.json").write_text(sizes)
        info = read_model(folder)
    else:
        info = inspect_model(models.save(models.mlp(batch=2), folder))
    policy = Policy.coerce({"execution": _ASKED[engine, device], "kernels": {} if engine == "torch" else _KERNELS})
    return Request(model=info, device=device, policy=policy)


def _judge(engine: str, device: str, folder: Path) -> Judgement:
    judge = default_registry().get(engine).judge(_request(engine, device, folder), _MACHINE)
    assert judge.verdict.accepted, judge.verdict.reason
    return judge


def test_every_engine_is_swept() -> None:
    names = {name for name in default_registry().names() if name != "null"}  # which has no settings
    assert {engine for engine, _ in _ASKED} >= names & {fact.name for fact in _FACTS}
    assert names >= {"onnxruntime", "openvino", "qnn", "tensorrt", "tensorrt-rtx", "torch"}
    assert [cls.__module__.split(".")[2] for cls in _classes()] == [
        "onnxruntime",
        "onnxruntime_genai",
        "openvino",
        "openvino_genai",
        "qnn",
        "tensorrt",
        "torch",
    ]
    for cls in _classes():
        assert issubclass(cls, EngineSettings), cls
        assert cls.__struct_config__.frozen, cls


@pytest.mark.parametrize(("engine", "device"), list(_ASKED))
def test_settings_are_values(engine: str, device: str, tmp_path: Path) -> None:
    settings = _judge(engine, device, tmp_path).settings
    assert isinstance(settings, EngineSettings)
    before = repr(settings)
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        hash(value)
        with pytest.raises(AttributeError):
            setattr(settings, name, value)
        if isinstance(value, Mapping):
            with pytest.raises(TypeError, match=r"an engine's settings are frozen; use settings\.replace"):
                value["more"] = "1"  # type: ignore[index]
    assert repr(settings) == before


@pytest.mark.parametrize(("engine", "device"), list(_ASKED))
def test_equal_requests_give_equal_settings(engine: str, device: str, tmp_path: Path) -> None:
    one, other = (_judge(engine, device, tmp_path).settings for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one.replace()):
        assert (again, hash(again)) == (one, hash(one))
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(one)), type(one)) == one
    assert one.replace(strict=True) != one
    assert one.strict is False


def test_what_is_given_to_settings_stays_apart_from_them() -> None:
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings

    given = {"device_id": "0"}
    settings = OnnxRuntimeSettings(provider="CUDAExecutionProvider", options=given)
    given["device_id"] = "1"
    assert settings.options == {"device_id": "0"}
    session = settings.with_options({"use_tf32": "0"}).with_session({"session.x64quantprecision": "1"})
    assert session.options == {"device_id": "0", "use_tf32": "0"}
    assert session.session == {"session.x64quantprecision": "1"}
    assert settings == OnnxRuntimeSettings(provider="CUDAExecutionProvider", options={"device_id": "0"})


WORDS = [word for engine in default_registry() for word in (engine.name, *engine.aliases)]


def control(engine: str, asked: object = "auto"):
    key = f"execution.provider_options.{engine}.level"
    book = ControlBuilder({key: "1", "execution.engine": asked})
    book.options("execution.provider_options.onnxruntime", ("onnxruntime", "ort", "onnxrt"), "handed over")
    return book.controls[0]


@pytest.mark.parametrize("word", [word for word in WORDS if word not in ("onnxruntime", "ort", "onnxrt")])
def test_options_of_every_other_engine_wait_for_it(word: str):
    found = control(word)
    assert (found.enforceability, found.resolved) == ("enforced", "-")
    assert word in found.reason


@pytest.mark.parametrize("word", ["onnxruntime", "ort", "onnxrt"])
def test_options_of_the_engine_that_runs_are_handed_over(word: str):
    found = control(word)
    assert (found.resolved, found.reason) == ("1", "handed over")
