# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An OCI image layout with the model and its lock, as ModelPack describes models: plain files, no registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.engines.native_export.native_config import NativeConfig
from xpuruntime.files.digests import file_digest
from xpuruntime.locks.export.portable import PortableExporter

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OciLayoutExporter"]

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
        for left in sorted((one for one in files.rglob("*") if one.is_dir()), reverse=True):
            left.rmdir()
        files.rmdir()
        plan = job.request.policy.execution
        config = {
            "descriptor": {"name": job.name, "version": job.digest},
            "config": {"format": job.request.model.format, "precision": plan.precision},
            "modelfs": {"type": "layers", "diffIds": [one["digest"] for one in layers]},
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
    """Move a file among the blobs, under its digest."""
    target = blobs / file_digest(path)
    path.replace(target)
    return target


def _written(value: Mapping[str, Any], blobs: Path) -> Path:
    path = blobs / "new"
    path.write_bytes(_json(value))
    return _moved(path, blobs)


def _descriptor(blob: Path, kind: str, name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"mediaType": kind, "digest": f"sha256:{blob.name}", "size": blob.stat().st_size}
    if name:
        found["annotations"] = {_TITLE: name, _PATH: name}
    return found
