# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Manifests of KServe: a runtime that runs ``xrt serve``, a service, and the folder of its models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.native_export.native_config import NativeConfig
from xpuruntime.locks.export.portable import LOCK, PortableExporter
from xpuruntime.policies.files import dumps

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KServeExporter", "service_name"]

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
