# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Manifest` and `Artifact`: a model compiled for one engine and one target, and what that is tied to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from xpuruntime.engines.model import ModelInfo
from xpuruntime.evidence.tolerances import ProbeResult

__all__ = [
    "MANIFEST",
    "PROBE",
    "SCHEMA",
    "Artifact",
    "FileFacts",
    "Manifest",
    "digest_of_files",
]

SCHEMA = "xpuruntime.artifact/1"
#: The file of an artifact's folder that says what it is.
MANIFEST = "manifest.json"
#: The probe input of an artifact and what fp32 on the CPU answers to it; only where a tolerance has to be met.
PROBE = "probe.npz"


class FileFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of an artifact: bytes, and SHA-256 in hex."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an artifact is, was made from, and is tied to. Lies beside the files as ``manifest.json``.

    Attributes
    ----------
    engine, device : str
        As in the plan that made it.
    model : ModelInfo
        Of the source model; that file itself is not needed to run the artifact.
    model_sha256 : str
        Of the source model file, with its external data.
    target : dict of str to str
        As `Engine.target` gave it: all of it must be the same where the artifact is loaded.
    policy, settings : dict
        The whole policy and the settings of the judgement, as plain values.
    files : dict of str to FileFacts
        Name relative to the manifest; `entry` is the one to open.
    entry : str
    node_map : dict of str to tuple of str
    notes : tuple of str
    calibration : str or None
        Digest of the inputs that it was quantised with.
    accuracy : ProbeResult or None
        How it did on a probe input when it was made, where a tolerance had to be met and the device was there.
    version : str
        Of this package.
    """

    engine: str
    device: str
    model: ModelInfo
    model_sha256: str
    target: dict[str, str]
    policy: dict[str, Any]
    settings: dict[str, Any]
    files: dict[str, FileFacts]
    entry: str
    node_map: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
    calibration: str | None = None
    accuracy: ProbeResult | None = None
    version: str = ""
    schema: str = SCHEMA


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact on disk whose manifest was read and whose files were checked."""

    folder: Path
    manifest: Manifest

    @property
    def entry(self) -> Path:
        """The file an engine opens."""
        return self.folder / self.manifest.entry

    def __repr__(self) -> str:
        return f"<Artifact {str(self.folder)!r} {self.manifest.engine}@{self.manifest.device}>"


def digest_of_files(artifact: Artifact) -> str:
    """Return one SHA-256, in hex, of all files of an artifact, by the digests in its manifest, and of its target."""
    manifest = artifact.manifest
    text = msgspec.json.encode((manifest.files, manifest.entry, manifest.target), order="sorted")
    return hashlib.sha256(text).hexdigest()
