# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Manifest` and `Artifact`: a model compiled for one engine and one target, and what that is tied to."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model import ModelInfo
from xpuruntime.engines.precision.compare import ProbeResult
from xpuruntime.errors import ModelError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request

__all__ = [
    "MANIFEST",
    "PROBE",
    "SCHEMA",
    "Artifact",
    "Compiled",
    "FileFacts",
    "Manifest",
    "calibration_digest",
    "digest_of_files",
    "external_digests",
    "model_digest",
]

SCHEMA = "xpuruntime.artifact/1"
#: The file of an artifact's folder that says what it is.
MANIFEST = "manifest.json"
#: The probe input of an artifact and what fp32 on the CPU answers to it; only where a tolerance has to be met.
PROBE = "probe.npz"


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What `Engine.compile` wrote into its folder.

    Attributes
    ----------
    files : tuple of str
        Names relative to the folder; the first is the one to open.
    node_map : dict of str to tuple of str
        Compiled unit to the source nodes it stands for, as far as the engine tells.
    notes : tuple of str
        What was converted or could not be kept.
    """

    files: tuple[str, ...]
    node_map: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()


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


def model_digest(info: ModelInfo) -> str:
    """Return the SHA-256, in hex, of a model file with its external data.

    Raises
    ------
    ModelError
        A file is gone, or the model changed since it was inspected.
    """
    if not info.external_files:
        return info.sha256
    digest = hashlib.sha256(info.sha256.encode())
    for location, found in external_digests(info).items():
        digest.update(f"{location}\0{found}\0".encode())
    return digest.hexdigest()


def external_digests(info: ModelInfo) -> dict[str, str]:
    """Return file of external data to its SHA-256, in hex. Raises as `model_digest`."""
    found = {}
    for file in sorted(info.external_files, key=lambda one: one.location):
        path = Path(info.base_dir or ".") / file.location
        try:
            facts = path.stat()
            found[file.location] = _remembered(str(path), facts.st_size, facts.st_mtime_ns)
        except OSError as error:
            msg = f"cannot use the model {info.path!r}: its data {file.location!r} cannot be read ({reason_of(error)})"
            raise ModelError(f"{msg}. Fix: put the file back beside the model.") from None
    return found


def digest_of_files(artifact: Artifact) -> str:
    """Return one SHA-256, in hex, of all files of an artifact, by the digests in its manifest, and of its target."""
    manifest = artifact.manifest
    text = msgspec.json.encode((manifest.files, manifest.entry, manifest.target), order="sorted")
    return hashlib.sha256(text).hexdigest()


@functools.lru_cache(maxsize=64)
def _remembered(path: str, size: int, mtime_ns: int) -> str:
    """Return the digest of a file that had this size and time."""
    del size, mtime_ns
    return file_digest(path)


def calibration_digest(request: Request) -> str | None:
    """Return a digest of the inputs that a request quantises with, or ``None`` where it has none."""
    if request.calibration is None or request.policy.execution.precision != "int8":  # else it is for the probe alone
        return None
    return str(request.calibration.digest)
