# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Store of compiled artifacts: each is compiled, probed and published whole or not at all, once at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.artifacts.manifest import (
    MANIFEST,
    PROBE,
    SCHEMA,
    SUFFIX,
    Artifact,
    FileFacts,
    Manifest,
    compiled_keys,
    foreign_artifact,
    made_files,
    open_artifact,
    read_manifest,
    stale_artifact,
)
from xpuruntime.engines.accuracy import (
    AccuracyCheck,
    Reference,
    check_accuracy,
    check_due,
    make_reference,
    write_reference,
)
from xpuruntime.engines.base import Compiled, Engine, Recipe, Request, judge
from xpuruntime.engines.model.external import model_digest
from xpuruntime.engines.quantization.judge import calibration_digest
from xpuruntime.errors import EngineError, InputError, ModelError, XpuRuntimeError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import cache_folder, json_bytes, kind_of, make_private, not_private, reason_of, with_home
from xpuruntime.files.writing import locked, publish_folder, staging
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.tolerances import ProbeResult
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

#: The folder in its staging folder while it is written.
_NEW = "folder.part"


def build(
    recipe: Recipe, folder: Path, *, existing: Literal["refuse", "use", "rebuild", "remake", "replace"]
) -> tuple[Artifact, bool]:
    """Compile a model into a folder, which appears whole or not at all.

    It is written beside its place, loaded and probed where that can be done here, and moved there. Others who build
    the same folder wait and take what was made.
    """
    if existing in ("refuse", "replace"):
        _check_place(folder, replace=existing == "replace")
        _refuse_source(recipe, folder)
    exists = os.path.lexists(folder)
    try:
        if existing in ("use", "rebuild", "remake"):
            make_private(folder.parent)
        else:
            folder = Path(os.path.realpath(folder))
            folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            if os.path.lexists(folder) and existing != "remake" and (existing != "replace" or not exists):
                # "refuse" and not `found`: another process made it while this one waited.
                taken = _take(recipe, folder, rebuild=existing == "rebuild")
                if taken is not None:
                    return taken, False
            return _make(recipe, folder, entry=existing in ("rebuild", "remake")), True
    except OSError as error:
        raise _not_written(folder, error) from None


def copy_artifact(artifact: Artifact, folder: Path, *, overwrite: bool) -> Artifact:
    """Copy an artifact, whole or not at all. Raises as `build`."""
    _check_place(folder, replace=overwrite)
    _refuse_inside(folder, (("the artifact that the session is made from", artifact.folder),))
    try:
        folder = Path(os.path.realpath(folder))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")), staging(folder) as room:
            new = room / _NEW
            new.mkdir()
            for name in (*artifact.manifest.files, MANIFEST):
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.folder / name, new / name)
            open_artifact(new)
            publish_folder(new, folder, check=_refuse_foreign if overwrite else _refuse_existing)
    except OSError as error:
        raise _not_written(folder, error) from None
    return Artifact(folder=folder.absolute(), manifest=artifact.manifest)


def _check_place(folder: Path, *, replace: bool) -> None:
    if not folder.name or folder.name == "..":
        raise InputError(f"cannot make the artifact {str(folder)!r}: the path names no new folder. Fix: add a name")
    if os.path.lexists(folder):
        if not replace:
            _refuse_existing(folder)
        _refuse_foreign(folder)


def _refuse_existing(folder: Path) -> None:
    fix = "name another place, or overwrite it with overwrite=True (xrt compile --force)"
    raise InputError(f"{str(folder)!r} is there already", fix=fix)


def _refuse_foreign(folder: Path) -> None:
    names = made_files(folder)
    if names is None:
        kind = kind_of(folder)
        what = f"it is a {kind}" if kind != "folder" else f"it is a folder without the {MANIFEST} of an artifact"
        if kind == "missing":
            what = "it is a link to a missing file"
    else:
        others = _others(folder, names)
        if not others:
            return
        what = f"{others[0]!r} in it is no file of that artifact"
    msg = f"cannot replace {str(folder)!r}: {what}. Fix: state another place, or move it away yourself"
    raise InputError(msg)


def _others(folder: Path, names: tuple[str, ...]) -> list[str]:
    known = {PurePosixPath(name) for name in names}
    known |= {parent for name in known for parent in name.parents}
    paths = (PurePosixPath(path.relative_to(folder).as_posix()) for path in folder.rglob("*"))
    return sorted(str(path) for path in paths if path not in known)


def _refuse_source(recipe: Recipe, folder: Path) -> None:
    info = recipe.request.model
    base = Path(info.base_dir or ".")
    _refuse_inside(
        folder,
        (
            ("the model", Path(info.file)),
            *(("the data of the model", base / file.location) for file in info.external_files),
        ),
    )


def _refuse_inside(folder: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    target = Path(os.path.realpath(folder))
    for what, path in inputs:
        try:
            real = Path(os.path.realpath(path))
        except ValueError:  # a model that is no file
            continue
        if os.path.lexists(real) and (real == target or target in real.parents):
            msg = f"cannot replace {str(folder)!r}: {what}, {str(path)!r}, lies there. Fix: state another place"
            raise InputError(msg)


def _misfit(recipe: Recipe, artifact: Artifact) -> str | None:
    engine, request, judgement, machine = recipe
    manifest = artifact.manifest
    foreign = foreign_artifact(artifact, engine.name, request.device)
    if foreign is not None:
        return foreign.reason
    if manifest.model_sha256 != model_digest(request.model):
        return "it was compiled from another model"
    if manifest.calibration != calibration_digest(request):
        return "it was quantized with other calibration inputs"
    stale = stale_artifact(engine, msgspec.structs.replace(request, artifact=artifact), judgement, machine)
    return None if stale is None else stale.reason


def usable(recipe: Recipe, folder: Path) -> Artifact:
    """Return the artifact that is there."""
    artifact = open_artifact(folder)
    reason = _misfit(recipe, artifact)
    if reason is not None:
        msg = f"cannot use the artifact {str(folder)!r}: {reason}. Fix: remove it, and it is made again."
        raise EngineError(msg, engine=recipe.engine.name, device=recipe.request.device)
    return artifact


def _take(recipe: Recipe, folder: Path, *, rebuild: bool) -> Artifact | None:
    try:
        return usable(recipe, folder)
    except (ModelError, EngineError):
        if rebuild:
            return None
        raise


def _make(recipe: Recipe, folder: Path, *, entry: bool) -> Artifact:
    with staging(folder) as room:
        new = room / _NEW
        new.mkdir()
        _compile(recipe, new)
        manifest = read_manifest(new)
        publish_folder(new, folder, check=_refuse_no_entry if entry else _refuse_foreign)
    return Artifact(folder=folder.absolute(), manifest=manifest)


def _refuse_no_entry(folder: Path) -> None:
    """Refuse to replace what no xpuruntime cache has made, whatever its name; a damaged manifest may be any bytes."""
    if folder.is_symlink() or kind_of(folder / MANIFEST) != "file":
        msg = f"cannot replace {str(folder)!r}: it is no entry of a cache. Fix: move it away"
        raise ModelError(msg)


def _compile(recipe: Recipe, folder: Path) -> None:
    """Write the files and the manifest; load and probe the result where that can be done here."""
    from xpuruntime import __version__

    engine, request, judgement, machine = recipe
    wanted = msgspec.structs.replace(request, artifact=None, purpose="compile")
    check = check_due(request, judgement)
    reference = _reference(request, engine, machine, check)
    compiled = engine.compile(wanted, judgement, machine, folder)
    names = _listed(compiled, folder, engine.name)
    if reference is not None and write_reference(reference, folder / PROBE):
        names = (*names, PROBE)
    info = request.model
    manifest = Manifest(
        engine=engine.name,
        device=request.device,
        model=_recorded(info),
        model_sha256=model_digest(info),
        target=engine.target(wanted, judgement, machine),
        policy=request.policy.to_dict(),
        settings=msgspec.to_builtins(judgement.settings, enc_hook=str),
        files={name: _facts(folder / name) for name in names},
        entry=compiled.files[0],
        node_map=compiled.node_map,
        notes=compiled.notes,
        calibration=calibration_digest(request),
        version=__version__,
    )
    with_artifact = msgspec.structs.replace(request, artifact=Artifact(folder=folder, manifest=manifest), purpose="run")
    here = judge(engine, with_artifact, machine)
    if here.verdict.accepted:
        loaded = engine.load(with_artifact, here, machine)
        try:
            if reference is not None and check is not None:
                proof = check_accuracy(with_artifact, engine.name, loaded, reference, check)
                manifest = msgspec.structs.replace(manifest, accuracy=_finite(proof))
        finally:
            loaded.close()
    else:
        note = f"not loaded where it was made: {here.verdict.reason}"
        manifest = msgspec.structs.replace(manifest, notes=(*manifest.notes, note))
    text = msgspec.json.format(json_bytes(manifest, enc_hook=str), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def _recorded(info: ModelInfo) -> ModelInfo:
    """Return what a manifest says of a model: its paths as they were given."""
    folder = None if info.base_dir is None else printable(str(Path(info.path).parent))
    return msgspec.structs.replace(
        info, data=None, source=None, digest=info.sha256, path=printable(info.path), base_dir=folder
    )


def _reference(request: Request, engine: Engine, machine: Machine, check: AccuracyCheck | None) -> Reference | None:
    if check is None:
        return None
    from xpuruntime.engines.precision.probe import ProbeRefusedError

    try:
        return make_reference(request, engine, machine)
    except XpuRuntimeError as error:
        if check.refuses and not isinstance(error, ProbeRefusedError):
            raise
        return None


def _listed(compiled: Compiled, folder: Path, engine: str) -> tuple[str, ...]:
    if not compiled.files:
        msg = f"{engine} compiled nothing: it names no file. Fix: use another engine"
        raise EngineError(msg, engine=engine)
    for name in compiled.files:
        if not (folder / name).is_file() or not (folder / name).stat().st_size:
            msg = f"{engine} did not write {name!r} of the compiled model, or wrote nothing into it: is the disk full?"
            raise EngineError(msg, engine=engine)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in compiled.files:
            path.unlink()
    return compiled.files


def _facts(path: Path) -> FileFacts:
    return FileFacts(size=path.stat().st_size, sha256=file_digest(path))


def _finite(proof: ProbeResult) -> ProbeResult:
    """Return figures that JSON can hold: against a reference of zeros the relative difference is infinite."""
    largest = sys.float_info.max
    outputs = tuple(msgspec.structs.replace(output, max_rel=min(output.max_rel, largest)) for output in proof.outputs)
    return msgspec.structs.replace(proof, outputs=outputs)


def _not_written(folder: Path, error: OSError) -> XpuRuntimeError:
    reason = reason_of(error)
    where = f" ({error.filename})" if error.filename else ""
    msg = (
        f"the artifact {str(folder)!r} could not be written: {reason}{where}. Fix: free the disk or name a folder "
        "that can be written; with execution.artifacts.cache: off, sessions keep nothing"
    )
    return XpuRuntimeError(msg)


def artifact_cache(policy: Policy) -> Path:
    """Return the folder that ``execution.artifacts.cache`` names; it may not exist yet."""
    stated = policy.execution.artifacts.cache
    if stated == "default":
        return cache_folder() / "artifacts"
    return with_home(stated, "execution.artifacts.cache")


def cache_key(recipe: Recipe) -> str:
    """Return the name of the artifact in a cache: a digest of all that makes a difference to it."""
    engine, request, judgement, machine = recipe
    parts = (
        SCHEMA,
        engine.name,
        request.device.partition(":")[0],
        model_digest(request.model),
        compiled_keys(engine, request.policy),
        engine.target(request, judgement, machine),
        calibration_digest(request),
    )
    text = json_bytes(parts, enc_hook=_plain, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def _plain(value: object) -> object:
    return value.to_plain() if hasattr(value, "to_plain") else str(value)


def cached(recipe: Recipe) -> tuple[Artifact, bool, str]:
    """Return the artifact of the cache, whether it was made now, and a warning or empty text.

    What is there is read without a lock. Of a folder that others may write to nothing is taken.
    """
    artifacts = recipe.request.policy.execution.artifacts
    folder = artifact_cache(recipe.request.policy) / f"{cache_key(recipe)}{SUFFIX}"
    if kind_of(folder) != "missing":
        _refuse_entry_of_others(folder)
        shared = not_private(folder.parent)
        if shared is not None:
            warning = (
                f"the artifact cache {str(folder.parent)!r} is not used, and the model was compiled again, since "
                f"another user may have written there: {shared}"
            )
            return build(recipe, folder, existing="remake")[0], True, warning
        try:
            return usable(recipe, folder), False, ""
        except (ModelError, EngineError) as error:
            if artifacts.stale != "rebuild":
                msg = f"{error} Or state execution.artifacts.stale: rebuild."
                raise type(error)(msg, engine=error.engine, device=error.device) from None
    artifact, compiled = build(recipe, folder, existing="rebuild" if artifacts.stale == "rebuild" else "use")
    return artifact, compiled, ""


def _refuse_entry_of_others(folder: Path) -> None:
    """Refuse an entry of a cache that another user may have put there. Raises XpuRuntimeError."""
    inside = folder.rglob("*") if kind_of(folder) == "folder" else ()
    for path in chain((folder,), inside):
        reason = not_private(path)
        if reason is not None:
            raise XpuRuntimeError(
                f"cannot use the entry {str(folder)!r} of the artifact cache, since another user may have written it: "
                f"{reason}"
            )
