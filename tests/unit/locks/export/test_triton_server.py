# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exports for Triton in Triton Inference Server itself, with its Python backend on the CPU; see `triton_server`."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from test_servers import on_cuda
from triton_server import TritonServer, triton_folder

import xpuruntime as xrt
from xpuruntime.serving.conformance.checking import check_server
from xpuruntime.testing import models

POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu", "threads": 1}}
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
KINDS = {
    "BOOL": (TensorProto.BOOL, np.array([[True, False]])),
    "UINT8": (TensorProto.UINT8, np.array([[1, 255]], np.uint8)),
    "INT64": (TensorProto.INT64, np.array([[-(2**62), 3]])),
    "FP16": (TensorProto.FLOAT16, np.array([[0.5, 65504]], np.float16)),
    "FP64": (TensorProto.DOUBLE, np.array([[0.1, np.pi]])),
    "BYTES": (TensorProto.STRING, np.array([["날씨", ""]], object)),
    "scalar": (TensorProto.FLOAT, np.array(2.5, np.float32)),
}
#: The call that `KINDS` is for tritonclient: BYTES as UTF-8, and a scalar as [1].
CALL: dict[str, list[Any]] = {
    name: [name if name != "scalar" else "FP32", list(array.shape) or [1], array.reshape(-1).tolist()]
    for name, (_, array) in KINDS.items()
}
CALL["BYTES"][2] = [one.encode().decode("latin-1") for one in CALL["BYTES"][2]]


def kinds() -> onnx.ModelProto:
    """Return a model that gives its inputs back, one of each type."""
    sides: list[list[onnx.ValueInfoProto]] = [
        [
            helper.make_tensor_value_info(name + end, kind, ["N", 2] if array.ndim else [])
            for name, (kind, array) in KINDS.items()
        ]
        for end in ("", "_out")
    ]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in KINDS]
    return helper.make_model(
        helper.make_graph(nodes, "kinds", *sides), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )


def as_model(repository: Path, path: Path, name: str, *changes: tuple[str, str]) -> Path:
    """Copy a model of another repository under a name of its own, with changes of its configuration."""
    folder = repository / name
    (source,) = (path.parent for path in path.glob("*/config.pbtxt"))
    shutil.copytree(source, folder)
    config = folder / "config.pbtxt"
    text = config.read_text()
    for before, after in ((f'name: "{source.name}"', f'name: "{name}"'), *changes):
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    return folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of two models: ``mlp`` and ``kinds`` for the Python backend, ``native`` for that of ONNX Runtime."""
    triton_folder()
    folder = tmp_path_factory.mktemp("exports")
    inputs = {"mlp": {"x": X}, "kinds": {name: array for name, (_, array) in KINDS.items()}}
    for name, model in (("mlp", models.mlp()), ("kinds", kinds())):
        path = models.save(model, folder, f"{name}.onnx")
        xrt.lock(path, POLICY, folder / f"{name}.lock", inputs=inputs[name])
        xrt.export_lock(folder / f"{name}.lock", "triton-python", folder / name)
        xrt.export_lock(folder / f"{name}.lock", "triton", folder / f"native-{name}")
    return folder


@pytest.fixture(scope="module")
def server(exports: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server whose models are loaded by their names."""
    work = tmp_path_factory.mktemp("triton")
    repository = work / "repository"
    repository.mkdir()
    as_model(repository, exports / "mlp", "mlp")
    as_model(repository, exports / "kinds", "kinds", ("count: 1", "count: 2"))
    as_model(
        repository, exports / "mlp", "batched",
        ("max_batch_size: 0", "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 100000 }"),
        ("dims: [ -1, 64 ]", "dims: [ 64 ]"),
    )  # fmt: skip
    broken = as_model(repository, exports / "mlp", "broken")
    shutil.copyfile(exports / "kinds.onnx", broken / "1" / "mlp.onnx")
    as_model(repository, exports / "native-mlp", "native")
    as_model(repository, exports / "native-kinds", "native_kinds")
    xrt.export_lock(on_cuda(exports / "mlp.lock", work), "triton", work / "cuda", model=exports / "mlp.onnx")
    as_model(repository, work / "cuda", "native_cuda")
    if importlib.util.find_spec("openvino") is not None:
        policy = {"execution": {"engine": "openvino", "device": "cpu", "threads": 1}}
        xrt.lock(exports / "mlp.onnx", policy, work / "openvino.lock", inputs={"x": X})
        xrt.export_lock(work / "openvino.lock", "triton", work / "openvino", model=exports / "mlp.onnx")
        as_model(repository, work / "openvino", "native_openvino")
    as_model(repository, exports / "native-mlp", "misspelt", ("max_batch_size", "max_batch_sizes"))
    chosen = [f"--load-model={name}" for name in ("mlp", "kinds", "batched")]
    started = TritonServer(
        repository, work / "run", "--model-control-mode=explicit", "--strict-readiness=false", *chosen
    )
    try:
        yield started.started()
    finally:
        started.stop()


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_answers_are_those_of_a_session(server: TritonServer, exports: Path, transport: str) -> None:
    with xrt.InferenceSession(exports / "mlp.onnx", lock=exports / "mlp.lock") as session:
        expected = np.asarray(session.run({"x": X})["y"])
    found = server.infer(transport, "mlp", {"x": ["FP32", [2, 64], X.reshape(-1).tolist()]}, outputs=["y"])
    assert found["outputs"] == {"y": [list(expected.shape), expected.reshape(-1).tolist()]}


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_every_type_with_two_instances(server: TritonServer, transport: str) -> None:
    found = server.infer(transport, "kinds", CALL, times=20)
    assert found["answers"] == 20
    assert found["outputs"] == {f"{name}_out": [shape, data] for name, (_, shape, data) in CALL.items()}
    empty = {**CALL, "INT64": ["INT64", [0, 2], []]}
    assert server.infer(transport, "kinds", empty)["outputs"]["INT64_out"] == [[0, 2], []]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_batcher_of_triton(server: TritonServer, exports: Path, transport: str) -> None:
    with xrt.InferenceSession(exports / "mlp.onnx", lock=exports / "mlp.lock") as session:
        expected = np.asarray(session.run({"x": X[:1]})["y"])
    before = stats(server)
    found = server.infer(transport, "batched", {"x": ["FP32", [1, 64], X[0].tolist()]}, times=16)
    assert found["outputs"]["y"] == [list(expected.shape), expected.reshape(-1).tolist()]
    inferences, executions = (now - then for now, then in zip(stats(server), before, strict=True))
    assert inferences == 16
    assert executions < 16, "no requests came to the model together"


def stats(server: TritonServer) -> tuple[int, int]:
    (one,) = server.ask("GET", "/v2/models/batched/stats")[1]["model_stats"]
    return one["inference_count"], one["execution_count"]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_wrong_requests_are_refused(server: TritonServer, transport: str) -> None:
    invalid = {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"}[transport]
    x = ["FP32", [2, 64], X.reshape(-1).tolist()]
    wrong = {
        "unexpected inference input 'nope'": ("mlp", {"nope": x}),
        "Expected [-1,64], got [128]": ("mlp", {"x": ["FP32", [128], x[2]]}),
        "Expected [-1,64], got [2,32]": ("mlp", {"x": ["FP32", [2, 32], x[2][:64]]}),
        "data-type is 'FP64', but model 'mlp' expects 'FP32'": ("mlp", {"x": ["FP64", [2, 64], x[2]]}),
        "InputError: input 'BYTES' has bytes that are not UTF-8": (
            "kinds",
            {**CALL, "BYTES": ["BYTES", [1, 2], ["a\xff", ""]]},
        ),
    }
    for words, (model, inputs) in wrong.items():
        found = server.infer(transport, model, inputs)
        assert found.get("status") == invalid, found
        assert words in found["message"]
    assert server.infer(transport, "mlp", {"x": x})["answers"] == 1


def test_a_lock_that_does_not_hold(server: TritonServer) -> None:
    status, answer = server.ask("POST", "/v2/repository/models/broken/load")
    assert status == 400
    assert re.search(
        r"LockError: the lock broken/1/session.lock does not hold for \S+: model mlp.onnx", answer["error"]
    )
    index = {one["name"]: one for one in server.ask("POST", "/v2/repository/index")[1]}
    assert index["broken"]["state"] == "UNAVAILABLE"
    assert "LockError" in index["broken"]["reason"]


@pytest.mark.parametrize("name", ["native", "native_kinds", "native_cuda", "native_openvino"])
def test_native_configuration_is_taken_up_to_the_backend(server: TritonServer, name: str) -> None:
    """The wheel has no such backends; Triton parses and validates a configuration before it looks for one."""
    backend = "onnxruntime"
    if name == "native_openvino":
        pytest.importorskip(backend := "openvino")
    status, answer = server.ask("POST", f"/v2/repository/models/{name}/load")
    assert status == 400
    assert f"unable to find backend library for backend '{backend}'" in answer["error"]
    assert "failed to poll" in server.ask("POST", "/v2/repository/models/misspelt/load")[1]["error"]


def test_load_and_unload(server: TritonServer) -> None:
    x = {"x": ["FP32", [2, 64], X.reshape(-1).tolist()]}
    assert server.ask("POST", "/v2/repository/models/mlp/unload")[0] == 200
    assert "'mlp' has no available versions" in server.infer("http", "mlp", x)["message"]
    assert server.ask("POST", "/v2/repository/models/mlp/load")[0] == 200
    assert server.infer("http", "mlp", x)["answers"] == 1


def test_oip_check(server: TritonServer) -> None:
    result = check_server(server.url, server.grpc, models=["mlp", "kinds"])
    assert result.server == "triton 2.51.0"
    assert [(one.transport, one.name, one.detail) for one in result.failed] == []
    unseen = {(check.transport, check.name) for check in result.checks if check.outcome == "unobservable"}
    assert all("kinds" in name for _, name in unseen), "only FP16 has no form in JSON"


def test_the_documented_command_and_sigterm(exports: Path, tmp_path: Path) -> None:
    server = TritonServer(exports / "mlp", tmp_path / "run").started()
    try:
        assert server.infer("http", "mlp", {"x": ["FP32", [1, 64], X[0].tolist()]})["answers"] == 1
    finally:
        code = server.stop()
    assert code == 0
    assert "successfully unloaded 'mlp' version 1" in server.log
    assert "Traceback" not in server.log


def test_a_backend_that_misreads_numpy_2(exports: Path, tmp_path: Path) -> None:
    if int(np.__version__.partition(".")[0]) < 2:
        pytest.skip("this environment has NumPy 1")
    server = TritonServer(exports / "mlp", tmp_path / "run", numpy1=False)
    assert server.process.wait(timeout=60) == 1
    assert f"does not read arrays of NumPy {np.__version__}: [0, 1] came back as [0.0, 0.0]" in server.log
    assert "Fix: install numpy<2" in server.log
