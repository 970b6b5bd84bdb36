# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Writing compiled artifacts: whole or not at all, once at a time."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from xpuruntime.engines.accuracy import check_accuracy, check_due, make_reference, write_reference
from xpuruntime.engines.artifact import (
    MANIFEST,
    PROBE,
    Artifact,
    FileFacts,
    Manifest,
    calibration_digest,
    file_digest,
    model_digest,
)
from xpuruntime.errors import EngineError, InputError, ModelError, XpuRuntimeError
from xpuruntime.inference.artifacts import open_artifact, read_manifest
from xpuruntime.planning.artifacts import foreign_artifact, stale_artifact
from xpuruntime.runtime.locking import locked

if TYPE_CHECKING:
    from xpuruntime.engines.accuracy import Check, Reference
    from xpuruntime.engines.artifact import Compiled
    from xpuruntime.engines.base import Engine, Judgement, Request
    from xpuruntime.engines.precision import ProbeResult
    from xpuruntime.runtime.machine import Machine

__all__ = ["Recipe", "build", "copy_artifact", "usable"]


class Recipe(NamedTuple):
    """All that a compilation needs. The judgement is the engine's own, of this request."""

    engine: Engine
    request: Request
    judgement: Judgement
    machine: Machine


def build(
    recipe: Recipe, folder: Path, *, existing: Literal["refuse", "use", "mend", "replace"]
) -> tuple[Artifact, bool]:
    """Compile a model into a folder, which appears whole or not at all.

    It is written beside its place, loaded and probed where that can be done here, and moved there. Others who build
    the same folder wait and take what was made.

    Parameters
    ----------
    recipe : Recipe
    folder : Path
    existing : {"refuse", "use", "mend", "replace"}
        What happens to one that is there: an error; it is taken if it fits, else an error; it is taken if it fits,
        else made again; it is made again.

    Returns
    -------
    Artifact
    bool
        Whether it was made by this call.

    Raises
    ------
    InputError
        It is there already.
    ModelError, EngineError
        What is there is damaged or does not fit; the compilation or the probe failed.
    XpuRuntimeError
        It cannot be written: permissions, a full disk.
    """
    found = folder.exists()
    if found and existing == "refuse":
        _refuse_existing(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            _remove_leftovers(folder)
            if folder.exists() and (existing != "replace" or not found):
                # "refuse" and not `found`: another process made it while this one waited.
                taken = _take(recipe, folder, mend=existing == "mend")
                if taken is not None:
                    return taken, False
            return _make(recipe, folder), True
    except OSError as error:
        raise _not_written(folder, error) from None


def copy_artifact(artifact: Artifact, folder: Path, *, overwrite: bool) -> Artifact:
    """Copy an artifact, whole or not at all. Raises as `build`."""
    if folder.exists() and not overwrite:
        _refuse_existing(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            _remove_leftovers(folder)
            temporary = _temporary(folder)
            try:
                for name in (*artifact.manifest.files, MANIFEST):
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(artifact.folder / name, temporary / name)
                open_artifact(temporary)
                _publish(temporary, folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise _not_written(folder, error) from None
    return Artifact(folder=folder.absolute(), manifest=artifact.manifest)


def _misfit(recipe: Recipe, artifact: Artifact) -> str | None:
    """Return why an artifact is not the one that `recipe` makes, or ``None``."""
    engine, request, judgement, machine = recipe
    made = artifact.manifest
    foreign = foreign_artifact(artifact, engine.name, request.device)
    if foreign is not None:
        return foreign.reason
    if made.model_sha256 != model_digest(request.model):
        return "it was compiled from another model"
    if made.calibration != calibration_digest(request):
        return "it was quantised with other calibration inputs"
    stale = stale_artifact(engine, msgspec.structs.replace(request, artifact=artifact), judgement, machine)
    return None if stale is None else stale.reason


def usable(recipe: Recipe, folder: Path) -> Artifact:
    """Return the artifact that is there.

    Raises
    ------
    ModelError
        It is damaged, or no artifact.
    EngineError
        It is not the one that `recipe` makes.
    """
    artifact = open_artifact(folder)
    reason = _misfit(recipe, artifact)
    if reason is not None:
        msg = f"cannot use the artifact {str(folder)!r}: {reason}. Fix: remove it, and it is made again."
        raise EngineError(msg, engine=recipe.engine.name, device=recipe.request.device)
    return artifact


def _take(recipe: Recipe, folder: Path, *, mend: bool) -> Artifact | None:
    """Return what is there if it fits, or ``None`` where it may be made again."""
    try:
        return usable(recipe, folder)
    except (ModelError, EngineError):
        if mend:
            return None
        raise


def _make(recipe: Recipe, folder: Path) -> Artifact:
    temporary = _temporary(folder)
    try:
        _compile(recipe, temporary)
        manifest = read_manifest(temporary)
        _publish(temporary, folder)
    except BaseException:  # also Ctrl-C: nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Artifact(folder=folder.absolute(), manifest=manifest)


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
        model=msgspec.structs.replace(info, data=None, source=None, digest=info.sha256),
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
    asked = msgspec.structs.replace(request, artifact=Artifact(folder=folder, manifest=manifest), purpose="run")
    here = engine.judge(asked, machine)
    if here.verdict.accepted:
        loaded = engine.load(asked, here, machine)
        try:
            if reference is not None and check is not None:
                proof = check_accuracy(asked, engine.name, loaded, reference, check)
                manifest = msgspec.structs.replace(manifest, accuracy=_finite(proof))
        finally:
            loaded.close()
    else:
        note = f"not loaded where it was made: {here.verdict.reason}"
        manifest = msgspec.structs.replace(manifest, notes=(*manifest.notes, note))
    text = msgspec.json.format(msgspec.json.encode(manifest, enc_hook=str), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def _reference(request: Request, engine: Engine, machine: Machine, check: Check | None) -> Reference | None:
    """Return what the result is held against, where that is due."""
    if check is None:
        return None
    try:
        return make_reference(request, engine, machine)
    except XpuRuntimeError:
        if check.refuses:
            raise
        return None


def _listed(compiled: Compiled, folder: Path, engine: str) -> tuple[str, ...]:
    """Return the files of a compilation, which must be there; remove what else is."""
    if not compiled.files:
        msg = f"{engine} compiled nothing: it names no file; use another engine"
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
    outputs = tuple(msgspec.structs.replace(one, max_rel=min(one.max_rel, largest)) for one in proof.outputs)
    return msgspec.structs.replace(proof, outputs=outputs)


def _temporary(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))


def _remove_leftovers(folder: Path) -> None:
    """Remove what builders that were killed have left; the lock is held, so none is at work."""
    for path in folder.parent.iterdir():
        if path.name.startswith(f".{folder.name}.") and path.suffix in (".part", ".old"):
            shutil.rmtree(path, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Put a finished folder in its place."""
    for path in (*temporary.rglob("*"), temporary):
        _settle(path)
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o777 & ~mask)
    if folder.exists() or folder.is_symlink():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".old"))
        folder.rename(old / "old")
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(folder)
    _settle(folder.parent)


def _settle(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows has no such call for folders
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_existing(folder: Path) -> None:
    msg = f"{str(folder)!r} is there already; state another place, or overwrite=True (xrt compile --force)"
    raise InputError(msg)


def _not_written(folder: Path, error: OSError) -> XpuRuntimeError:
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    msg = (
        f"the artifact {str(folder)!r} could not be written: {reason}{where}. Fix: free the disk or name a folder "
        "that can be written; with execution.artifacts.cache: off, sessions keep nothing"
    )
    return XpuRuntimeError(msg)
