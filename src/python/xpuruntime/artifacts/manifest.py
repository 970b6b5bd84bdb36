# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fit of a compiled artifact: whether it may be loaded for what is asked, and what becomes of the keys about it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from xpuruntime.engines.base import Engine, Judgement, Refusal, Request
from xpuruntime.engines.model import ModelInfo
from xpuruntime.engines.quantization.judge import calibration_digest
from xpuruntime.errors import ModelError
from xpuruntime.evidence.records import Control, Verdict, VerdictCode
from xpuruntime.evidence.tolerances import ProbeResult
from xpuruntime.files.digests import digest_of
from xpuruntime.files.paths import kind_of, reason_of
from xpuruntime.files.reading import decode_json, open_regular, read_regular
from xpuruntime.policies import ArtifactPolicy, Policy

if TYPE_CHECKING:
    from xpuruntime.runtime.machine import Machine

#: Keys that the plan and the session answer themselves: an artifact is the same whatever they say.
_PLAN_KEYS = (
    "mode",
    "accuracy",
    "execution.engine",
    "execution.device",
    "execution.fallback",
    "execution.artifacts",
)
#: The calibration inputs of an artifact are compared by their digest.
_INPUTS = "calibration."
_OPTIONS = "execution.provider_options."
_AGAIN = "compile the model again: xrt compile MODEL -o FOLDER"


def compiled_keys(engine: Engine, policy: Policy) -> dict[str, Any]:
    """Return the stated keys of a policy that change what `engine` compiles."""
    free = (*_PLAN_KEYS, *engine.runtime_keys)
    own = tuple(f"{_OPTIONS}{name}." for name in (engine.name, *engine.aliases))
    return {
        key: value
        for key, value in policy.stated().items()
        if not any(key == path or key.startswith((f"{path}.", f"{path}[")) for path in free)
        and (not key.startswith(_OPTIONS) or key.startswith(own))
        and not key.startswith(_INPUTS)
    }


def foreign_artifact(artifact: Artifact, engine: str, device: str) -> Verdict | None:
    """Return the refusal of a candidate that the artifact was not made for, or ``None``."""
    manifest = artifact.manifest
    if manifest.engine == engine and _family(manifest.device) == _family(device):
        return None
    return Refusal(
        VerdictCode.ARTIFACT_FOREIGN,
        f"the artifact {artifact.folder} was compiled by {manifest.engine} for {manifest.device}",
        f"leave engine and device out, or compile the model for {engine}@{device}",
    ).verdict(engine, device)


def stale_artifact(engine: Engine, request: Request, judgement: Judgement, machine: Machine) -> Verdict | None:
    """Return the refusal of an artifact that does not fit policy or target, or ``None``. Pure."""
    artifact = request.artifact
    if artifact is None:
        return None
    manifest = artifact.manifest
    before, now = compiled_keys(engine, Policy.coerce(manifest.policy)), compiled_keys(engine, request.policy)
    policy = _differences(before, now, "its policy said", "and is asked for now")
    target = _differences(
        manifest.target, engine.target(request, judgement, machine), "it was compiled for", "and here is"
    )
    inputs = []
    if request.calibration is not None and calibration_digest(request) != manifest.calibration:
        inputs.append(
            "it was not quantized with calibration inputs, and some are given"
            if manifest.calibration is None
            else "it was quantized with other calibration inputs"
        )
    if not policy and not target and not inputs:
        return None
    return Refusal(
        VerdictCode.ARTIFACT_STALE,
        f"the artifact {artifact.folder} does not fit: " + "; ".join((*policy, *inputs, *target)),
        _AGAIN if target else f"ask for the same, or {_AGAIN}",
    ).verdict(engine.name, request.device)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], stored: str, current: str) -> list[str]:
    def show(value: Any) -> str:
        return "nothing" if value is None else str(value)

    return [
        f"{stored} {key} {show(before.get(key))} {current} {show(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def _family(device: str) -> str:
    return device.partition(":")[0]


def refuse_compiling(engine: Engine, request: Request, judgement: Judgement) -> Verdict | None:
    """Return the refusal of a request that is to be compiled and cannot be, or ``None``."""
    if judgement.uncompilable is None or request.purpose != "compile":
        return None
    return Refusal(
        VerdictCode.COMPILE_UNSUPPORTED,
        judgement.uncompilable,
        "load the model itself, or compile it without that",
    ).verdict(engine.name, request.device)


def artifact_controls(engine: Engine, request: Request, judgement: Judgement) -> dict[str, Control]:
    """Return the controls of the stated keys of ``execution.artifacts``; they mean the same for every engine."""
    policy, artifact = request.policy, request.artifact
    artifacts = policy.execution.artifacts
    controls = {}
    for key in policy.stated():
        if not key.startswith("execution.artifacts."):
            continue
        requested = str(getattr(artifacts, key.rpartition(".")[2]))
        resolved, level, reason, fix = requested, "enforced", "", None
        if artifact is not None:
            resolved, reason = "-", f"the session is made from the artifact {artifact.folder}, and keeps no other"
        elif artifacts.cache == "off":
            reason = "nothing is kept"
        elif not engine.compiles:
            resolved, level = "-", "unsupported"
            reason = f"{engine.name} makes no compiled artifact: the model is loaded anew each time"
            fix = "name an engine that compiles, or leave the key out"
        elif judgement.uncompilable is not None:
            resolved, level, reason = "-", "unsupported", judgement.uncompilable
            fix = "change what cannot be compiled, or leave the key out"
        elif key.endswith(".cache"):
            reason = "the first session compiles the model and keeps it; later ones load that"
        else:
            reason = "an artifact in the cache that is damaged or does not fit is " + (
                "made again" if artifacts.stale == "rebuild" else "refused"
            )
        controls[key] = Control(
            key=key,
            requested=requested,
            resolved=resolved,
            enforceability=level,  # type: ignore[arg-type]
            reason=reason,
            fix=fix,
        )
    return controls


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
        Digest of the inputs that it was quantized with.
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


#: What the folder of an artifact ends in, by custom.
SUFFIX = ".xrt"
_FAMILY = "xpuruntime.artifact/"
_MAX_MANIFEST = 1 << 30


def find_artifact(model: Any) -> Artifact | None:
    """Return the artifact that a model argument names, or ``None`` where it names something else.

    A folder that ends in ``.xrt`` or holds a ``manifest.json`` is an artifact.
    """
    folder = _folder(model)
    return None if folder is None else open_artifact(folder)


def artifact_model(model: Any) -> ModelInfo | None:
    """Return the model of the artifact that an argument names, from its manifest alone; see `find_artifact`."""
    folder = _folder(model)
    return None if folder is None else read_manifest(folder).model


def _folder(model: Any) -> Path | None:
    if not isinstance(model, (str, os.PathLike)):
        return None
    path = os.fspath(model)
    if not isinstance(path, str):
        return None
    folder = Path(path)
    if folder.suffix == SUFFIX or (kind_of(folder) == "folder" and kind_of(folder / MANIFEST) == "file"):
        return folder
    return None


def made_files(folder: Path) -> tuple[str, ...] | None:
    """Return the files that the manifest of an artifact lists, of any release; ``None`` for another folder.

    Damaged and newer artifacts have such a manifest, too: this is about whose files they are, not about using them.
    """
    if kind_of(folder) != "folder":
        return None
    import json

    try:
        plain = json.loads(read_regular(folder / MANIFEST, _MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return None
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_FAMILY) or not isinstance(plain.get("files"), dict):
        return None
    return (*plain["files"], MANIFEST)


def open_artifact(folder: str | os.PathLike[str]) -> Artifact:
    """Read the manifest of an artifact and check every file it lists. Nothing is loaded."""
    path = Path(folder)
    manifest = read_manifest(path)
    if manifest.entry not in manifest.files:
        _refuse(path, f"its manifest lists no file {manifest.entry!r}, which is the one to open")
    for name, facts in manifest.files.items():
        _check_file(path, name, facts.size, facts.sha256)
    return Artifact(folder=path.absolute(), manifest=manifest)


def artifact_policy(artifact: Artifact) -> Policy:
    """Return the policy that an artifact runs under when its session is given none: its own, on its own engine."""
    policy = Policy.coerce(artifact.manifest.policy)
    execution = policy.execution.replace(
        engine=(artifact.manifest.engine,),
        device=artifact.manifest.device,
        fallback="error",
        artifacts=ArtifactPolicy(),
    )
    return policy.replace(execution=execution)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an artifact and nothing else. Raises `ModelError`."""
    path = folder / MANIFEST
    try:
        data = read_regular(path, _MAX_MANIFEST)
    except FileNotFoundError:
        if kind_of(folder) == "missing":
            _refuse(folder, "there is no such folder", "correct the path, or compile the model first")
        if kind_of(folder) != "folder":
            _refuse(folder, "it is a file, and an artifact is a folder", "give the folder that `xrt compile` wrote")
        _refuse(folder, f"it has no {MANIFEST}", "give the folder that `xrt compile` wrote")
    except NotADirectoryError:
        _refuse(folder, "it is a file, and an artifact is a folder", "give the folder that `xrt compile` wrote")
    except OSError as error:
        _refuse(
            folder, f"its {MANIFEST} cannot be read ({reason_of(error)})", "give the folder that `xrt compile` wrote"
        )
    try:
        plain = decode_json(data)
    except msgspec.MsgspecError as error:
        _refuse(folder, f"its {MANIFEST} is damaged or cut off: {error}")
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema != SCHEMA:
        _refuse_schema(folder, schema)
    try:
        manifest = msgspec.convert(plain, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        _refuse(folder, f"its {MANIFEST} is not one that this release reads: {error}")
    try:
        unknown = _unknown(plain, msgspec.json.decode(msgspec.json.encode(manifest)), "")
    except RecursionError:
        _refuse(folder, f"its {MANIFEST} is nested too deeply")
    if unknown is not None:
        _refuse(folder, f"its {MANIFEST} has the unknown key {unknown}")
    return manifest


def _refuse_schema(folder: Path, schema: object) -> NoReturn:
    version = schema.removeprefix(_FAMILY) if isinstance(schema, str) and schema.startswith(_FAMILY) else ""
    if version.isdecimal() and int(version) > int(SCHEMA.removeprefix(_FAMILY)):
        _refuse(
            folder,
            f"it was made by a newer release (schema {schema}); this one reads {SCHEMA}",
            "upgrade xpuruntime, or compile the model again with this release",
        )
    _refuse(folder, f"the schema of its {MANIFEST} is {schema!r}, and this release reads {SCHEMA}")


def _unknown(stated: Any, read: Any, where: str) -> str | None:
    """Return the first key of `given` that is not in what was read from it."""
    if isinstance(stated, dict) and isinstance(read, dict):
        for key, value in stated.items():
            if key not in read:
                return f"{where}{key}"
            unknown = _unknown(value, read[key], f"{where}{key}.")
            if unknown is not None:
                return unknown
    elif isinstance(stated, list) and isinstance(read, list):
        for index, (value, other) in enumerate(zip(stated, read, strict=False)):
            unknown = _unknown(value, other, f"{where.rstrip('.')}[{index}].")
            if unknown is not None:
                return unknown
    return None


def _check_file(folder: Path, name: str, size: int, digest: str) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or not parts.parts or ":" in name:
        _refuse(folder, f"its manifest names the file {name!r}, which is not inside of it", "do not use this artifact")
    path = folder / name
    try:
        with open_regular(path) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                what = "cut off" if actual < size else "too long"
                _refuse(folder, f"its file {name!r} is {what}: {actual} bytes, and {size} were written")
            same = digest_of(file, actual) == digest
        if not same:
            _refuse(folder, f"its file {name!r} was altered: the SHA-256 is not that of the manifest")
    except FileNotFoundError:
        _refuse(folder, f"its file {name!r} is missing")
    except OSError as error:
        _refuse(folder, f"its file {name!r} cannot be read ({reason_of(error)})")


def _refuse(folder: Path, reason: str, fix: str = _AGAIN) -> NoReturn:
    raise ModelError(f"cannot use the artifact {str(folder)!r}: {reason}. Fix: {fix}.")
