# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exports with the lock in them: Triton's Python backend, KServe, and an OCI layout."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import yaml
from google.protobuf import text_format
from test_servers import model_config

import xpuruntime as xrt
from xpuruntime.locks.export.targets import service_name
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[4]
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lock of a model with external data, made under a variable that engines read."""
    folder = tmp_path_factory.mktemp("portable")
    (folder / "w").mkdir()
    onnx.save_model(
        models.mlp(), str(folder / "mlp.onnx"), save_as_external_data=True, location="w/mlp.data", size_threshold=0
    )
    policy = {"mode": "strict", "execution": {"engine": "onnxruntime", "device": "cpu", "threads": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "0")
        xrt.lock(folder / "mlp.onnx", policy, folder / "mlp.lock", shapes={"x": (2, 64)})
        yield folder / "mlp.lock"


@pytest.fixture(scope="module")
def expected(lock: Path) -> np.ndarray:
    with xrt.InferenceSession(lock.with_name("mlp.onnx"), lock=lock) as session:
        return np.asarray(session.run({"x": X})["y"])


class Tensor:
    """A tensor as ``triton_python_backend_utils`` has it."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    @classmethod
    def from_dlpack(cls, name: str, capsule: Any) -> Tensor:
        shared = types.SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))
        return cls(name, np.from_dlpack(shared))


class Request:
    def __init__(self, tensors: list[Tensor], names: list[str]) -> None:
        self._tensors, self._names = tensors, names

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def requested_output_names(self) -> list[str]:
        return self._names


class Error(str):
    """An error as the backend has it: its text, and a code."""

    INTERNAL, INVALID_ARG = range(2)

    def __new__(cls, text: str, code: int) -> Error:
        new = super().__new__(cls, text)
        new.code = code
        return new

    code: int


class Response:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: Any = None) -> None:
        self.output_tensors, self.error = output_tensors, error


def test_model_of_triton(lock: Path, expected: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = xrt.export_lock(lock, "triton-python", tmp_path / "repo", strict=True)
    folder = tmp_path / "repo" / "mlp"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config()())
    assert (config.backend, config.name, config.max_batch_size) == ("python", "mlp", 0)
    assert {key.outcome for key in result.keys} == {"kept"}
    utils = types.ModuleType("triton_python_backend_utils")
    utils.Tensor, utils.InferenceResponse, utils.TritonError = Tensor, Response, Error  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_repository": str(folder), "model_version": "1"})
    good, bad = model.execute([Request([Tensor("x", X)], ["y"]), Request([Tensor("nope", X)], ["y"])])
    model.finalize()
    assert good.output_tensors[0].name() == "y"
    assert good.output_tensors[0].as_numpy().tobytes() == expected.tobytes()
    assert bad.error.startswith("InputError: the model has no input 'nope'")
    assert bad.error.code == Error.INVALID_ARG


def test_kserve(lock: Path, expected: np.ndarray, tmp_path: Path) -> None:
    out = tmp_path / "kserve"
    xrt.export_lock(lock, "kserve", out)
    runtime = yaml.safe_load((out / "runtime.yaml").read_text())
    service = yaml.safe_load((out / "service.yaml").read_text())
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ClusterServingRuntime")
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert {port["containerPort"] for port in container["ports"]} == {8080, 9000}
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert runtime["spec"]["protocolVersions"] == ["v2", "grpc-v2"]
    predictor = service["spec"]["predictor"]["model"]
    assert predictor["runtime"] == runtime["metadata"]["name"]
    assert predictor["modelFormat"]["name"] in [
        supportedmodelformat["name"] for supportedmodelformat in runtime["spec"]["supportedModelFormats"]
    ]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "RawDeployment"}
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    assert container["args"] == ["serve", "/mnt/models/serve.yaml"]
    (demanded,) = (
        validator.expect for validator in xrt.load_lock(lock).identity.validators if validator.kind == "environment"
    )
    assert container["env"] == [{"name": name, "value": value} for name, value in sorted(demanded.items())]
    assert {"name": "ORT_LOAD_CONFIG_FROM_MODEL", "value": "0"} in container["env"]
    settings = ServeSettings.load(out / "models" / "serve.yaml")
    assert settings.http.listen == f"0.0.0.0:{runtime['spec']['annotations']['prometheus.kserve.io/port']}"
    assert settings.metrics.path == runtime["spec"]["annotations"]["prometheus.kserve.io/path"]
    model = settings.models["mlp"]
    with xrt.InferenceSession(model.source, lock=model.lock) as session:
        assert np.asarray(session.run({"x": X})["y"]).tobytes() == expected.tobytes()


def test_manifests_fit_the_models_of_kserve(lock: Path, tmp_path: Path) -> None:
    interpreter = os.environ.get("KSERVE_PYTHON")
    if not interpreter:
        pytest.skip("KSERVE_PYTHON names no interpreter with kserve; `make test-kserve` makes one")
    xrt.export_lock(lock, "kserve", tmp_path / "out")
    manifests = [tmp_path / "out" / "runtime.yaml", tmp_path / "out" / "service.yaml"]
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(manifests[1].read_text().replace("storageUri", "storageURI"))
    script = Path(__file__).with_name("kserve_manifests.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    documents = []
    for files in (manifests, [wrong]):
        command = [interpreter, str(script), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        documents.append(json.loads(done.stdout))
    assert documents == [[], ["InferenceService.spec.predictor.model: unknown key 'storageURI'"]]


def test_the_image_of_kserve() -> None:
    lines = [
        line.split(maxsplit=1)
        for line in (ROOT / "examples" / "serving" / "Containerfile").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    words = dict(lines)
    assert lines[0][0] == "FROM"
    assert json.loads(words["ENTRYPOINT"]) == ["xrt"]
    assert json.loads(words["CMD"]) == ["serve", "/mnt/models/serve.yaml"]
    assert words["EXPOSE"].split() == ["8080", "9000"]
    assert words["USER"] != "root"
    assert words["ARG"] == 'ENGINE=""', "a wheel of ONNX Runtime would be installed over that of the package"


def blob(out: Path, descriptor: dict[str, Any]) -> bytes:
    """Return what a descriptor names, with its digest and size computed anew."""
    kind, _, digits = descriptor["digest"].partition(":")
    data = (out / "blobs" / kind / digits).read_bytes()
    assert (kind, hashlib.sha256(data).hexdigest(), len(data)) == ("sha256", digits, descriptor["size"])
    return data


def test_oci_layout(lock: Path, expected: np.ndarray, tmp_path: Path) -> None:
    out = tmp_path / "oci"
    result = xrt.export_lock(lock, "oci-layout", out)
    assert json.loads((out / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((out / "index.json").read_text())
    assert (index["schemaVersion"], index["mediaType"]) == (2, "application/vnd.oci.image.index.v1+json")
    (entry,) = index["manifests"]
    manifest = json.loads(blob(out, entry))
    assert manifest["artifactType"] == entry["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["mediaType"] == entry["mediaType"]
    config = json.loads(blob(out, manifest["config"]))
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]
    assert config["config"]["format"] == "onnx"
    for layer in manifest["layers"]:
        path = tmp_path / "pulled" / layer["annotations"]["org.opencontainers.image.title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob(out, layer))
    kinds = {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds == {
        "mlp.onnx": "application/vnd.cncf.model.weight.v1.raw",
        "w/mlp.data": "application/vnd.cncf.model.weight.v1.raw",
        "session.lock": "application/vnd.cncf.model.weight.config.v1.raw",
    }
    named = {one["digest"] for one in (entry, manifest["config"], *manifest["layers"])}
    assert {f"sha256:{path.name}" for path in (out / "blobs" / "sha256").iterdir()} == named
    assert set(result.files) == {
        "oci-layout", "index.json", *(f"blobs/sha256/{one.removeprefix('sha256:')}" for one in named),
    }  # fmt: skip
    with xrt.InferenceSession(tmp_path / "pulled" / "mlp.onnx", lock=tmp_path / "pulled" / "session.lock") as session:
        assert np.asarray(session.run({"x": X})["y"]).tobytes() == expected.tobytes()


def test_a_layout_has_no_times_in_it(lock: Path, tmp_path: Path) -> None:
    first = xrt.export_lock(lock, "oci-layout", tmp_path / "a")
    assert xrt.export_lock(lock, "oci-layout", tmp_path / "b").files == first.files


def test_every_engine_has_them() -> None:
    targets = xrt.export_targets()
    assert {"qnn", "onnxruntime", "torch"} <= set(targets["oci-layout"])
    assert targets["torch"] == ("torch",)


@pytest.mark.parametrize(
    ("name", "word"),
    [("3D_Net.v2", "model-3d-net-v2"), ("a" * 49 + "-b", "a" * 49), ("_", "model"), ("Net", "net")],
)
def test_names_of_services_begin_with_a_letter(name: str, word: str) -> None:
    assert service_name(name) == word
