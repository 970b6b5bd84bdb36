# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`export_lock`: the session of a lock as native configuration of its engine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.argument_types import TEXT, check_types
from xpuruntime.engines.base import Request
from xpuruntime.engines.native_export.native_config import RECORD, ExportJob, KeyOutcome, NativeExporter
from xpuruntime.engines.registry import EngineRegistry, known_engines
from xpuruntime.errors import InputError, LockError, UnsupportedOperationError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import json_bytes, kind_of, reason_of, user_path
from xpuruntime.files.reading import read_regular
from xpuruntime.files.writing import publish_folder, staging
from xpuruntime.inference.locked import surroundings
from xpuruntime.lockfile.canonical import load_lock, model_beside
from xpuruntime.lockfile.consistency import session_records
from xpuruntime.lockfile.drift import ValidatorKind, drift_error
from xpuruntime.lockfile.rules import policy_of, stated_keys
from xpuruntime.lockfile.validators import compare_validators
from xpuruntime.locks.export.result import ExportResult
from xpuruntime.locks.export.targets import KServeExporter, OciLayoutExporter, TritonPythonExporter
from xpuruntime.policies.document import did_you_mean
from xpuruntime.runtime.snapshot import machine_snapshot

if TYPE_CHECKING:
    from xpuruntime.lockfile.records import Lock

_SCHEMA = "xpuruntime.export/2"
_MAX_RECORD = 1 << 24
#: Validators of what is exported itself; the others are of the place where it runs.
_OF_THE_MODEL = ("model", "external_data", "calibration")
_NEW = "folder.part"
_NAMED = 6
#: What runs xpuruntime itself, for every engine.
_PORTABLE: tuple[type[NativeExporter], ...] = (TritonPythonExporter, KServeExporter, OciLayoutExporter)


def export_targets(registry: EngineRegistry | None = None) -> dict[str, tuple[str, ...]]:
    """Return what locks can be exported as, each with the engines whose sessions have such a form."""
    engines = known_engines(registry)
    targets = {target: tuple(engines.engines()) for form in _PORTABLE for target in form.targets}
    for engine in engines:
        exporter = engine.exporter()
        for target in () if exporter is None else exporter.targets:
            targets[target] = (*targets.get(target, ()), engine.name)
    return targets


def export_lock(
    lock: str | os.PathLike[str],
    target: str,
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    calibration: Any = None,
    strict: bool = False,
    prove: bool = False,
    python: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    trust: bool = False,
    registry: EngineRegistry | None = None,
) -> ExportResult:
    """Write the session of a lock as native configuration of its engine, which runs without xpuruntime.

    Parameters
    ----------
    lock : str or path
    target : str
        What to write: one of `export_targets`.
    output : str or path
        A folder, which appears whole or not at all.
    model : str or path, optional
        The locked model; default: the file of that name beside the lock.
    calibration : optional
        The locked inputs to quantize with, where the lock has such; as `InferenceSession` takes them.
    strict : bool
        Refuse where a key of the policy is not kept.
    prove : bool
        Run what was written in a fresh interpreter that cannot import xpuruntime, with the probe inputs of the lock,
        and compare outputs and units with the lock's.
    python : str or path, optional
        That interpreter; default: this one.
    overwrite : bool
        Replace an earlier export.
    trust : bool
        As for `InferenceSession`.

    Returns
    -------
    ExportResult

    Raises
    ------
    LockError
        The lock cannot be read, is none of a session, or the model or the calibration is another one.
    InputError
        There is no such target or model, or the folder is there already.
    UnsupportedOperationError
        The engine's sessions have no such form, or under `strict` a key is not kept.
    XpuRuntimeError
        The model cannot be prepared.
    """
    check_types({"target": TEXT}, {"target": target})
    source, path = user_path(lock, "the lock"), user_path(output, "the export")
    _check_place(path, overwrite=overwrite)
    locked = load_lock(source)
    engines = known_engines(registry)
    exporter = _exporter(locked, source, target, engines)
    job = _job(locked, source, model, calibration, trust=trust)
    exported = exporter(job)
    if prove and target not in exported.proved:
        raise UnsupportedOperationError(
            f"{target} is not run here, so nothing is proved. Fix: leave prove (--prove) out; those that can be proved "
            f"are {', '.join(exported.proved) or 'none'}"
        )
    result = _write(exported, target, job, path, strict=strict, overwrite=overwrite)
    if not prove:
        return result
    from xpuruntime.locks.export.result import prove_export

    interpreter = None if python is None else os.fspath(python)
    return msgspec.structs.replace(result, proof=prove_export(exported, target, path, locked, str(source), interpreter))


def _exporter(lock: Lock, where: Path, target: str, engines: EngineRegistry) -> type[NativeExporter]:
    records = session_records(lock.identity)
    if records is None:
        raise LockError(
            f"{where} is a lock of {lock.identity.subject}, and sessions alone are exported. Fix: make one with "
            "`xrt lock MODEL`"
        )
    if any(validator.kind == ValidatorKind.ARTIFACT for validator in lock.identity.validators):
        raise UnsupportedOperationError(
            f"{where} is a lock of a compiled artifact, which only xpuruntime opens. Fix: lock the model itself"
        )
    *_, plan = records
    portable = next((form for form in _PORTABLE if target in form.targets), None)
    if portable is not None:
        return portable
    exporter = engines.get(plan.engine).exporter()
    if exporter is not None and target in exporter.targets:
        return exporter
    known = export_targets(engines)
    if target not in known:
        raise InputError(f"{target!r} is nothing to export to{did_you_mean(target, known, 'targets')}")
    own = sorted(word for word, names in known.items() if plan.engine in names)
    raise UnsupportedOperationError(
        f"{target} is for {', '.join(known[target])}, and the lock {where} is of {plan.engine}. Fix: use one of "
        f"{plan.engine}'s targets, {', '.join(own)}; or lock the model on {known[target][0]}",
        engine=plan.engine,
    )


def _job(lock: Lock, where: Path, model: Any, calibration: Any, *, trust: bool) -> ExportJob:
    """Read the model, compare it with the lock, and return what an engine needs."""
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.registry import read_model
    from xpuruntime.inference.plan_request import calibration_of

    identity, records = lock.identity, session_records(lock.identity)
    assert records is not None
    locked, stated, plan = records
    path = model_beside(lock, where) if model is None else user_path(model, "the model")
    policy = policy_of(stated, where)
    info = with_shapes(read_model(path, trust=trust), policy)
    if info.graph_file is not None:
        raise UnsupportedOperationError(
            f"{info.path} is a folder, and an export holds a model of one file",
            fix="copy the folder with its lock, and open it there with lock=",
        )
    inputs = calibration_of(calibration, policy, info, lock=str(where))
    _check_same(lock, where, info, inputs)
    facts: Any = next(
        (validator.expect for validator in identity.validators if validator.kind == ValidatorKind.ENGINE), {}
    )
    version = facts.get("version") if isinstance(facts, dict) else None
    package = facts.get("package") if isinstance(facts, dict) else None
    return ExportJob(
        request=Request(model=info, device=plan.device, policy=policy, calibration=inputs),
        settings=dict(plan.settings),
        controls={key: (resolved, level) for key, resolved, level in plan.controls},
        stated=stated_keys(policy),
        version=str(version or ""),
        package=str(package or ""),
        digest=lock.digest,
        engine=plan.engine,
        name=_word(Path(locked.name).stem),
        lock_path=str(where),
        environment={
            name: value
            for validator in identity.validators
            if validator.kind == ValidatorKind.ENVIRONMENT and isinstance(validator.expect, dict)
            for name, value in validator.expect.items()
            if "." not in name  # what code sets in a process
        },
        shapes={name: shape for locked_shapes in identity.shapes for name, shape in locked_shapes.inputs.items()},
    )


def _check_same(lock: Lock, where: Path, info: Any, calibration: Any) -> None:
    identity = lock.identity
    assert identity.plan is not None
    about = tuple(validator for validator in identity.validators if validator.kind in _OF_THE_MODEL)
    here = surroundings(
        identity.plan.engine,
        identity.plan.device,
        machine_snapshot(),
        info,
        calibration=calibration,
        like=identity.model,
    )
    drifts = compare_validators(msgspec.structs.replace(identity, validators=about), here)
    if drifts:
        raise drift_error(str(where), drifts, model=info.path)


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._-") or "model"


def _write(
    exporter: NativeExporter, target: str, job: ExportJob, folder: Path, *, strict: bool, overwrite: bool
) -> ExportResult:
    try:
        folder = Path(os.path.realpath(folder))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staging(folder) as room:
            new = room / _NEW
            new.mkdir()
            config = exporter.write(target, new)
            if strict:
                _refuse_less(config.outcomes, target)
            files = {
                path.relative_to(new).as_posix(): file_digest(path) for path in sorted(new.rglob("*")) if path.is_file()
            }
            result = ExportResult(
                target=target,
                folder=str(folder),
                lock=job.digest,
                model=job.name,
                engine=job.engine,
                device=job.request.device,
                files=files,
                entry=config.entry,
                command=config.command,
                keys=config.outcomes,
                notes=config.notes,
            )
            (new / RECORD).write_bytes(msgspec.json.format(json_bytes(_record(result)), indent=1) + b"\n")
            publish_folder(new, folder, check=_refuse_foreign if overwrite else _refuse_existing)
    except OSError as error:
        raise InputError(
            f"cannot write the export '{folder}': {reason_of(error)}. Fix: give a path in a folder that exists, is "
            "writable and has room"
        ) from error
    return result


def _record(result: ExportResult) -> dict[str, Any]:
    """Return what stands in the folder: no path of this machine, so that two exports of a lock are the same."""
    kept = ("target", "lock", "model", "engine", "device", "files", "entry", "command", "keys", "notes")
    return {"schema": _SCHEMA, **{name: getattr(result, name) for name in kept}}


def _refuse_less(outcomes: tuple[KeyOutcome, ...], target: str) -> None:
    less = [outcome for outcome in outcomes if outcome.outcome != "kept"]
    if not less:
        return
    lines = "; ".join(f"{control.key} is {control.outcome}: {control.reason}" for control in less[:_NAMED])
    tail = f"; and {len(less) - _NAMED} more" if len(less) > _NAMED else ""
    raise UnsupportedOperationError(
        f"{target} does not keep every key of the policy: {lines}{tail}. Fix: take these keys out of the policy and "
        "lock again, or leave strict (--strict) out"
    )


def _check_place(folder: Path, *, overwrite: bool) -> None:
    if not folder.name or folder.name == "..":
        raise InputError(f"cannot write the export {str(folder)!r}: the path names no new folder. Fix: add a name")
    if os.path.lexists(folder):
        (_refuse_foreign if overwrite else _refuse_existing)(folder)


def _refuse_existing(folder: Path) -> None:
    raise InputError(f"{str(folder)!r} is there already. Fix: state another place, or overwrite it with --force")


def _refuse_foreign(folder: Path) -> None:
    if kind_of(folder) == "folder":
        try:
            plain = msgspec.json.decode(read_regular(folder / RECORD, _MAX_RECORD))
            ours = {*plain["files"], RECORD} if plain["schema"] == _SCHEMA else None
        except (OSError, msgspec.MsgspecError, KeyError, TypeError):
            ours = None
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        if ours is not None and there <= ours:
            return
    raise InputError(
        f"{str(folder)!r} is no folder that an export wrote, alone. Fix: state another place, or remove it"
    )
