# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Configuration of servers and of trtexec, which are not run here: compared with documented fields and options."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from locked_cases import with_ids

import xpuruntime as xrt
from xpuruntime.engines.base import Request
from xpuruntime.engines.model import TensorInfo, inspect_model, with_shapes
from xpuruntime.engines.native_export.native_config import ExportJob
from xpuruntime.engines.native_export.triton_config import tensor_configs
from xpuruntime.engines.tensorrt.controls import resolve_settings
from xpuruntime.engines.tensorrt.native_config import TrtexecExporter
from xpuruntime.engines.tensorrt.options import TENSORRT
from xpuruntime.lockfile.canonical import save_lock
from xpuruntime.lockfile.records import Lock
from xpuruntime.lockfile.rules import stated_keys
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.testing import models

#: Message to its fields, as Triton's ``model_config.proto`` has them: number, and a type or the name of a message; a
#: ``*`` is a repeated field, a ``{}`` a map of text.
SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "ModelConfig": {
        "name": (1, "string"), "max_batch_size": (4, "int32"),
        "input": (5, "ModelInput*"), "output": (6, "ModelOutput*"),
        "instance_group": (7, "ModelInstanceGroup*"), "default_model_filename": (8, "string"),
        "optimization": (12, "ModelOptimizationPolicy"), "parameters": (14, "Parameters{}"), "backend": (17, "string"),
    },
    "ModelInput": {
        "name": (1, "string"), "data_type": (2, "DataType"), "dims": (4, "int64*"), "reshape": (5, "Reshape"),
    },
    "ModelOutput": {
        "name": (1, "string"), "data_type": (2, "DataType"), "dims": (3, "int64*"), "reshape": (5, "Reshape"),
    },
    "Reshape": {"shape": (1, "int64*")},
    "ModelInstanceGroup": {"name": (1, "string"), "count": (2, "int32"), "gpus": (3, "int32*"), "kind": (4, "Kind")},
    "ModelOptimizationPolicy": {"graph": (1, "Graph"), "execution_accelerators": (5, "ExecutionAccelerators")},
    "Graph": {"level": (1, "int32")},
    "ExecutionAccelerators": {"gpu_execution_accelerator": (1, "Accelerator*")},
    "Accelerator": {"name": (1, "string"), "parameters": (2, "string{}")},
    "Parameters": {"string_value": (1, "string")},
}  # fmt: skip
ENUMS = {
    "DataType": (
        "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8",
        "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
    ),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
}  # fmt: skip
#: Options that the help of trtexec 10 and 11 lists.
TRTEXEC = {
    "onnx", "saveEngine", "skipInference", "device", "stronglyTyped", "noTF32", "memPoolSize", "minShapes", "optShapes",
    "maxShapes", "builderOptimizationLevel", "maxAuxStreams", "maxTactics", "avgTiming", "l2LimitForTiling",
    "profilingVerbosity", "sparsity", "versionCompatible", "stripWeights", "allowWeightStreaming",
    "tilingOptimizationLevel", "hardwareCompatibilityLevel", "runtimePlatform", "refit", "noBuilderCache",
    "timingCacheFile", "errorOnTimingCacheMiss",
}  # fmt: skip


def model_config() -> Any:
    """Return the class of Triton's model configuration, as far as it is used."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in SCHEMA.items():
        made = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = made.field.add(name=name, number=number)
            word = kind.rstrip("*{}")
            field.label = kinds.LABEL_REPEATED if kind[-1] in "*}" else kinds.LABEL_OPTIONAL
            if kind.endswith("{}"):
                entry = made.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
                value = entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL)
                set_type(value, word)
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".inference.{message}.{entry.name}"
            else:
                set_type(field, word)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


def set_type(field: Any, word: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    plain = {"string": kinds.TYPE_STRING, "int32": kinds.TYPE_INT32, "int64": kinds.TYPE_INT64}
    if word in plain:
        field.type = plain[word]
    else:
        field.type = kinds.TYPE_ENUM if word in ENUMS else kinds.TYPE_MESSAGE
        field.type_name = f".inference.{word}"


def parse(path: Path) -> Any:
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config()())


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locked")
    model = models.save(models.mlp(), folder, "my model (1).onnx")
    policy = {
        "execution": {
            "engine": "onnxruntime",
            "device": "cpu",
            "threads": 3,
            "provider_options": {
                "onnxruntime": {"graph_optimization_level": "extended", "session.intra_op.allow_spinning": 0}
            },
        }
    }
    xrt.lock(model, policy, folder / "m.lock", shapes={"x": (2, 64)})
    return folder / "m.lock"


def test_triton_with_onnxruntime(locked: Path, tmp_path: Path) -> None:
    result = xrt.export_lock(locked, "triton", tmp_path / "repo")
    config = parse(tmp_path / "repo" / result.entry)
    assert (config.name, config.backend, config.max_batch_size) == ("my_model_1", "onnxruntime", 0)
    assert (config.input[0].name, list(config.input[0].dims), config.input[0].data_type) == ("x", [-1, 64], 11)
    assert config.optimization.graph.level == 1
    assert config.parameters["intra_op_thread_count"].string_value == "3"
    assert config.instance_group[0].kind == 2
    assert (tmp_path / "repo" / config.name / "1" / "model.onnx").is_file()
    lost = {one.key: one.outcome for one in result.not_kept}
    assert lost == {"execution.provider_options.onnxruntime.session.intra_op.allow_spinning": "lost"}
    assert any("--disable-auto-complete-config" in note for note in (*result.notes, result.command))


def on_cuda(path: Path, folder: Path) -> Path:
    """Return the lock as one of a session on CUDA would be, as far as an export reads it."""
    lock = xrt.load_lock(path)
    assert lock.identity.plan is not None
    settings = {
        **lock.identity.plan.settings,
        "provider": "CUDAExecutionProvider",
        "options": {"device_id": "1", "use_tf32": "0", "gpu_mem_limit": "1048576"},
    }
    plan = msgspec.structs.replace(lock.identity.plan, device="cuda:1", settings=settings)
    changes: dict[str, dict[str, Any]] = {
        "device": {"key": "cuda:1"},
        "cpu_isa": {"kind": "driver", "key": "nvidia", "expect": {"cuda": "13.0"}},
    }
    validators = tuple(
        msgspec.structs.replace(validator, **changes.get(validator.kind, {})) for validator in lock.identity.validators
    )
    identity = with_ids(msgspec.structs.replace(lock.identity, plan=plan, validators=validators))
    return save_lock(Lock.of(identity), folder / "cuda.lock")


def test_cuda_settings_are_written(locked: Path, tmp_path: Path) -> None:
    model = locked.with_name("my model (1).onnx")
    lock = on_cuda(locked, tmp_path)
    result = xrt.export_lock(lock, "triton", tmp_path / "repo", model=model)
    config = parse(tmp_path / "repo" / result.entry)
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert (accelerator.name, dict(accelerator.parameters)) == ("cuda", {"gpu_mem_limit": "1048576", "use_tf32": "0"})
    assert (config.instance_group[0].kind, list(config.instance_group[0].gpus)) == (1, [1])
    result = xrt.export_lock(lock, "ort-python", tmp_path / "script", model=model)
    script = (tmp_path / "script" / result.entry).read_text()
    values: dict[str, Any] = {}
    for name in ("PROVIDER", "PROVIDER_OPTIONS", "SESSION_ENTRIES"):
        match = re.search(rf"^{name} = (.*?)(?=^\w|\n\n)", script, re.MULTILINE | re.DOTALL)
        assert match is not None
        values[name] = eval(match[1])
    assert values["PROVIDER"] == "CUDAExecutionProvider"
    assert values["PROVIDER_OPTIONS"] == {"device_id": "1", "use_tf32": "0", "gpu_mem_limit": "1048576"}
    assert values["SESSION_ENTRIES"]["session.disable_cpu_ep_fallback"] == "1"
    compile(script, "session.py", "exec")


def test_triton_with_openvino(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    policy = {"execution": {"engine": "openvino", "device": "cpu", "threads": 2}}
    model = models.save(models.mlp(), tmp_path)
    xrt.lock(model, policy, tmp_path / "m.lock", shapes={"x": (2, 64)})
    result = xrt.export_lock(tmp_path / "m.lock", "triton", tmp_path / "repo", model=model)
    config = parse(tmp_path / "repo" / result.entry)
    assert config.backend == "openvino"
    assert {key: parameter.string_value for key, parameter in config.parameters.items()} == {
        "INFERENCE_NUM_THREADS": "2", "PERFORMANCE_HINT": "LATENCY", "TARGET_DEVICE": "CPU",
    }  # fmt: skip
    assert {"model.xml", "model.bin"} <= {Path(file).name for file in result.files}
    assert any("DYNAMIC_QUANTIZATION_GROUP_SIZE" in note for note in result.notes)


def test_tensors_of_rank_0_are_of_one_element() -> None:
    scalar = TensorInfo(name="s", dtype="float32", shape=())
    (config,) = tensor_configs([scalar], "m", backend="onnxruntime")
    assert config.dims == (1,)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"'s' of m has rank 0.* openvino backend .*Fix: give it"):
        tensor_configs([scalar], "m", backend="openvino", scalars=False)


FACTS = EngineFacts(
    name="tensorrt",
    version="10.9.0.34",
    loadable=True,
    providers=("cuda",),
    detail={
        "capabilities": "weak_typing timing_cache tactic_pinning weight_streaming refit hardware_compatibility tiling "
        "runtime_platform",
        "compute_capabilities": "",
    },
)


def trtexec(folder: Path, execution: dict[str, Any], version: str = "10.9.0.34") -> tuple[Path, Any, dict[str, str]]:
    policy = Policy.coerce({"execution": {"engine": "tensorrt", "device": "cuda:1", **execution}})
    info = with_shapes(inspect_model(models.save(models.mlp(), folder)), policy)
    request = Request(model=info, device="cuda:1", policy=policy)
    settings, controls = resolve_settings(request, TENSORRT, FACTS, "8.9")
    job = ExportJob(
        request=request,
        settings=msgspec.to_builtins(settings),
        controls={control.key: (control.resolved, control.enforceability) for control in controls},
        stated=stated_keys(policy),
        version=version,
        package=f"tensorrt=={version}",
        digest="sha256:0",
        engine="tensorrt",
        name="mlp",
    )
    out = folder / "out"
    out.mkdir()
    made = TrtexecExporter(job).write("trtexec", out)
    return out, made, {outcome.key: outcome.outcome for outcome in made.outcomes}


def test_trtexec(tmp_path: Path) -> None:
    options = {
        "builder_optimization_level": 4, "max_aux_streams": 0, "tiling_optimization_level": "moderate",
        "hardware_compatibility": "ampere_plus", "timing_cache": "./t.cache", "strict_nans": 1, "contexts": 2,
        "refit": "on", "sparse_weights": 1,
    }  # fmt: skip
    execution = {
        "precision": "fp32",
        "shapes": {"x": ["1..2..8", 64]},
        "memory": {"limit": 100000},
        "provider_options": {"tensorrt": options},
    }
    out, made, outcomes = trtexec(tmp_path, execution)
    arguments = json.loads((out / "arguments.json").read_text())
    assert {argument[2:].partition("=")[0] for argument in arguments} <= TRTEXEC
    assert {
        "--device=1", "--stronglyTyped", "--noTF32", "--memPoolSize=workspace:98K", "--minShapes=x:1x64",
        "--optShapes=x:2x64", "--maxShapes=x:8x64", "--builderOptimizationLevel=4", "--maxAuxStreams=0",
        "--tilingOptimizationLevel=2", "--hardwareCompatibilityLevel=ampere+", "--timingCacheFile=./t.cache", "--refit",
        "--sparsity=enable", "--profilingVerbosity=detailed",
    } <= set(arguments)  # fmt: skip
    head = "execution.provider_options.tensorrt."
    assert {key for key, word in outcomes.items() if word == "lost"} == {f"{head}strict_nans", f"{head}contexts"}
    assert outcomes["execution.memory.limit"] == "weakened"
    assert any("was not run" in note for note in made.notes)
    subprocess.run(["sh", "-n", str(out / "build.sh")], check=True)


def test_trtexec_of_a_converted_graph(tmp_path: Path) -> None:
    import onnx

    out, _, outcomes = trtexec(tmp_path, {"precision": "fp16", "shapes": {"x": [2, 64]}}, version="11.0.0")
    proto = onnx.load(out / "model.onnx")
    assert onnx.TensorProto.FLOAT16 in {one.data_type for one in proto.graph.initializer}
    arguments = json.loads((out / "arguments.json").read_text())
    assert "--stronglyTyped" not in arguments  # version 11 has no other networks
    assert "--noBuilderCache" in arguments
    assert outcomes["execution.precision"] == "kept"
