# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Targets of an export: KServe, Triton, an OCI layout, and paths that hold on another machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from xpuruntime.engines.native_export.native_config import (
    KeyOutcome,
    KeyOutcomes,
    NativeConfig,
    NativeExporter,
    free_place,
)
from xpuruntime.engines.native_export.triton_config import ModelConfig, tensor_configs
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.files.digests import file_digest
from xpuruntime.policies.files import dumps

#: The lock in an export.
LOCK = "session.lock"


class PortableExporter(NativeExporter):
    """Writes the model and its lock, so that every key of the policy holds where xpuruntime opens them."""

    targets: ClassVar[dict[str, str]] = {}

    def device_word(self) -> str:
        """Return the device of the plan."""
        return self.job.request.device

    def copy_model(self, folder: Path, *, also: Sequence[str] = ()) -> tuple[str, ...]:
        """Copy the model and its external data, and return their paths in the folder, the model first."""
        job, info = self.job, self.job.request.model
        if job.request.calibration is not None:
            raise UnsupportedOperationError(
                f"the session of {info.path} is quantized from calibration inputs as it is opened, which an export for "
                "servers does not have. Fix: export it to ort-python or openvino-json, whose graph is quantized"
            )
        folder.mkdir(parents=True, exist_ok=True)
        model = Path(info.file)
        names = [model.name, *(file.location for file in info.external_files)]
        for index, name in enumerate(names):
            target = free_place(folder, name, also=(LOCK, *also))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(info.base_dir or ".") / name if index else model, target)
        return tuple(names)

    def copy_lock(self, folder: Path) -> str:
        """Copy the lock, and return its name."""
        shutil.copyfile(self.job.lock_path, folder / LOCK)
        return LOCK

    def outcomes(self, reason: str) -> tuple[KeyOutcome, ...]:
        """Return every key as kept."""
        key_outcomes = KeyOutcomes(self.job, "xpuruntime")
        for key in self.job.stated:
            if key != "mode":
                key_outcomes.add(key, "kept", reason)
        return key_outcomes.settle(device=reason)


class TritonPythonExporter(PortableExporter):
    """Writes ``NAME/config.pbtxt`` and ``NAME/1/model.py`` with model and lock beside it."""

    targets: ClassVar[dict[str, str]] = {"triton-python": "a model repository for Triton's Python backend"}

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the repository."""
        del target
        job = self.job
        folder_of_model = folder / job.name
        names = self.copy_model(folder_of_model / "1", also=("model.py",))
        self.copy_lock(folder_of_model / "1")
        info = job.request.model
        scalars = [input_.name for input_ in info.inputs if input_.shape == ()]
        cuda = job.request.device.startswith("cuda")
        config = ModelConfig(
            name=job.name,
            backend="python",
            inputs=tensor_configs(info.inputs, job.name, backend="Python"),
            outputs=tensor_configs(info.outputs, job.name, backend="Python"),
            gpus=(int(job.request.device.partition(":")[2] or 0),) if cuda else (),
        )
        config.write(folder, job.digest)
        text = _MODEL.format(
            name=job.name, digest=job.digest, model=names[0], lock=LOCK, scalars=scalars, environment=job.environment
        )
        (folder_of_model / "1" / "model.py").write_text(text, encoding="utf-8")
        return NativeConfig(
            outcomes=self.outcomes("the session is opened under the lock"),
            entry=config.entry,
            command="tritonserver --model-repository=.",
            notes=(
                "the interpreter of Triton's stub needs xpuruntime and the engine: the stub of the released images is "
                "Python 3.12, another one is named by the parameter EXECUTION_ENV_PATH",
                "the lock holds on a machine like that which it was made on, with the same variables, of which Triton "
                "may set LD_LIBRARY_PATH, and the model does not load elsewhere",
                *(f"Triton has no tensors of rank 0: clients send {name!r} with the shape [1]" for name in scalars),
            ),
        )


_MODEL = '''\
"""The model {name}, opened under the lock {digest}. Written by xrt export."""

import ctypes
import os
from pathlib import Path

os.environ.update({environment})  # what the lock demands, before a library reads it

import numpy as np
import triton_python_backend_utils as pb_utils

import xpuruntime

SCALARS = {scalars}  # Triton has no tensors of rank 0: these come as [1], and outputs go as [1]


def check_numpy():
    """Refuse a backend that reads arrays of NumPy 2 as if they were of NumPy 1: tensors would have other values."""
    if int(np.__version__.partition(".")[0]) < 2:
        return
    array = np.arange(2, dtype=np.float32)
    capsule = array.__dlpack__()
    # The backend gives the capsule a name that NumPy's destructor does not know.
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    found = pb_utils.Tensor.from_dlpack("probe", capsule).as_numpy().tolist()
    if found != [0, 1]:
        raise RuntimeError(
            f"this Python backend of Triton does not read arrays of NumPy {{np.__version__}}: [0, 1] came back as "
            f"{{found}}. Fix: install numpy<2 for the interpreter of the stub, or use a newer Triton"
        )


class TritonPythonModel:
    def initialize(self, args):
        check_numpy()
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = xpuruntime.InferenceSession(folder / {model!r}, lock=folder / {lock!r})

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            inputs = {{one.name(): one.as_numpy() for one in request.inputs()}}
            inputs.update({{name: inputs[name].reshape(()) for name in SCALARS if name in inputs}})
            outputs = self.session.run(inputs)
            names = request.requested_output_names()
            tensors = [pb_utils.Tensor(name, np.atleast_1d(outputs[name])) for name in names]
        except xpuruntime.InputError as error:
            return failed(error, pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            return failed(error, pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def finalize(self):
        self.session.close()


def failed(error, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{{type(error).__name__}}: {{error}}", code))
'''


_RUNTIME, _SERVICE, _SETTINGS = "runtime.yaml", "service.yaml", "serve.yaml"
_MOUNT = "/mnt/models"
#: The ports that KServe's runtimes listen on.
_HTTP, _GRPC = 8080, 9000
#: Of a name in Kubernetes.
_LONGEST = 50


class KServeExporter(PortableExporter):
    """Writes ``runtime.yaml``, ``service.yaml`` and ``models/`` with ``serve.yaml``."""

    targets: ClassVar[dict[str, str]] = {"kserve": "manifests of KServe, for `xrt serve` in RawDeployment mode"}

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the manifests and the models."""
        del target
        from xpuruntime import __version__

        job = self.job
        models = folder / "models"
        names = self.copy_model(models, also=(_SETTINGS,))
        self.copy_lock(models)
        settings = {
            "schema": "xpuruntime.serve/1",
            "http": {"listen": f"0.0.0.0:{_HTTP}"},
            "grpc": {"listen": f"0.0.0.0:{_GRPC}"},
            "models": {job.name: {"source": names[0], "lock": LOCK}},
        }
        word = service_name(job.name)
        documents = {
            f"models/{_SETTINGS}": settings,
            _RUNTIME: _runtime(__version__, job.environment),
            _SERVICE: _service(word),
        }
        for name, document in documents.items():
            (folder / name).write_text(dumps(document, "yaml"), encoding="utf-8")
        return NativeConfig(
            outcomes=self.outcomes("`xrt serve` opens the session under the lock"),
            entry=_SERVICE,
            command=f"kubectl apply -f {_RUNTIME} -f {_SERVICE}",
            notes=(
                f"copy models/ to the storage that {_SERVICE} names in storageUri, and correct that",
                f"the image of {_RUNTIME} is one of yours; examples/serving/Containerfile builds it",
                "the lock holds on nodes like the machine that it was made on, and the service is not ready elsewhere",
                "the manifests fit the models of the package kserve 0.21.0; no cluster was used",
            ),
        )


def _runtime(version: str, environment: dict[str, str]) -> dict[str, Any]:
    probe = {"port": _HTTP, "scheme": "HTTP"}
    container = {
        "name": "kserve-container",
        "image": f"xpuruntime-serve:{version}",
        "args": ["serve", f"{_MOUNT}/{_SETTINGS}"],
        "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
        "ports": [
            {"name": "http", "containerPort": _HTTP, "protocol": "TCP"},
            {"name": "grpc", "containerPort": _GRPC, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", **probe}},
        "livenessProbe": {"httpGet": {"path": "/v2/health/live", **probe}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ClusterServingRuntime",
        "metadata": {"name": "xpuruntime"},
        "spec": {
            "annotations": {"prometheus.kserve.io/port": str(_HTTP), "prometheus.kserve.io/path": "/metrics"},
            "supportedModelFormats": [{"name": "xpuruntime", "version": "1", "autoSelect": False}],
            "protocolVersions": ["v2", "grpc-v2"],
            "containers": [container],
        },
    }


def _service(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name, "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"}},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "xpuruntime"},
                    "runtime": "xpuruntime",
                    "protocolVersion": "v2",
                    "storageUri": f"pvc://models/{name}",
                }
            }
        },
    }


def service_name(name: str) -> str:
    """Return a name that KServe takes: small letters, digits and ``-``, a letter first."""
    word = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return (word if word[:1].isalpha() else f"model-{word}")[:_LONGEST].strip("-")


_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG = "application/vnd.cncf.model.config.v1+json"
_WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
_WEIGHT_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
_TITLE = "org.opencontainers.image.title"
_PATH = "org.cncf.model.filepath"


class OciLayoutExporter(PortableExporter):
    """Writes ``oci-layout``, ``index.json`` and ``blobs/sha256``."""

    targets: ClassVar[dict[str, str]] = {"oci-layout": "an OCI image layout with model and lock, for a registry"}

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the layout. The same lock gives the same digests: it has no times in it."""
        del target
        job = self.job
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        files = folder / "files"
        names = self.copy_model(files)
        lock = self.copy_lock(files)
        layers = [
            _descriptor(_moved(files / name, blobs), _WEIGHT_CONFIG if name == lock else _WEIGHT, name)
            for name in (*names, lock)
        ]
        for left in sorted((path for path in files.rglob("*") if path.is_dir()), reverse=True):
            left.rmdir()
        files.rmdir()
        plan = job.request.policy.execution
        config = {
            "descriptor": {"name": job.name, "version": job.digest},
            "config": {"format": job.request.model.format, "precision": plan.precision},
            "modelfs": {"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": _ARTIFACT,
            "config": _descriptor(_written(config, blobs), _CONFIG),
            "layers": layers,
            "annotations": {"org.opencontainers.image.title": job.name, "io.xpuruntime.lock": job.digest},
        }
        described = _descriptor(_written(manifest, blobs), _MANIFEST)
        index = {
            "schemaVersion": 2,
            "mediaType": _INDEX,
            "manifests": [
                {
                    **described,
                    "artifactType": _ARTIFACT,
                    "annotations": {"org.opencontainers.image.ref.name": "latest"},
                }
            ],
        }
        (folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
        (folder / "index.json").write_bytes(_json(index))
        return NativeConfig(
            outcomes=self.outcomes("the lock is a layer; a session is opened under it"),
            entry="index.json",
            command=f"oras cp --from-oci-layout .:latest REGISTRY/{_repository(job.name)}:latest",
            notes=("the layout is plain files; nothing was sent to a registry",),
        )


def _repository(name: str) -> str:
    """Return a name that registries take: small letters and digits, joined by single ``-``."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower())) or "model"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _moved(path: Path, blobs: Path) -> Path:
    target = blobs / file_digest(path)
    path.replace(target)
    return target


def _written(value: Mapping[str, Any], blobs: Path) -> Path:
    path = blobs / "new"
    path.write_bytes(_json(value))
    return _moved(path, blobs)


def _descriptor(blob: Path, kind: str, name: str = "") -> dict[str, Any]:
    descriptor: dict[str, Any] = {"mediaType": kind, "digest": f"sha256:{blob.name}", "size": blob.stat().st_size}
    if name:
        descriptor["annotations"] = {_TITLE: name, _PATH: name}
    return descriptor
