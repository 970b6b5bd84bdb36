# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks as files, in canonical JSON, a record a line; as in-toto statements; and locks of exported models."""

from __future__ import annotations

import hashlib
import hmac
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError, LockError
from xpuruntime.files.paths import json_bytes, kind_of, reason_of, user_path
from xpuruntime.files.reading import decode_json, read_regular
from xpuruntime.files.writing import check_writable, replace_file
from xpuruntime.lockfile.consistency import contradiction, contradiction_of_figures
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.records import (
    SCHEMA,
    CallEntry,
    Identity,
    Lock,
    LockedModel,
    Provenance,
    Validator,
    digest_of_part,
    stable_id,
)
from xpuruntime.policies.document import nearest
from xpuruntime.printable import printable

if TYPE_CHECKING:
    import os

#: Bytes that the file of a lock may have.
MAX_LOCK = 1 << 30
_LAST_VERSION = int(SCHEMA.rpartition("/")[2])


class _Header(msgspec.Struct):
    """What shows that JSON is a lock."""

    schema: str


def lock_bytes(lock: Lock) -> bytes:
    """Return the text of a lock's file, UTF-8. What this release wrote and `parse_lock` read gives the same bytes."""
    plain = msgspec.json.decode(json_bytes(lock.filed(), order="sorted"))
    return ("\n".join(_lines(plain, 0)) + "\n").encode()


def _lines(value: dict[str, Any], depth: int) -> list[str]:
    """Return an object with one key a line; arrays of records get one record a line, other values are compact."""
    pad = " " * depth
    lines = ["{"]
    keys = sorted(value)
    for index, key in enumerate(keys):
        comma = "" if index == len(keys) - 1 else ","
        member, name = value[key], _compact(key)
        if isinstance(member, dict) and member and depth < 2:
            first, *rest = _lines(member, depth + 1)
            lines += [f"{pad} {name}: {first}", *rest[:-1], f"{rest[-1]}{comma}"]
        elif isinstance(member, list) and member and isinstance(member[0], (dict, list)):
            records = [f"{pad}  {_compact(record)}" for record in member]
            lines += [f"{pad} {name}: [", *(f"{record}," for record in records[:-1]), records[-1], f"{pad} ]{comma}"]
        else:
            lines.append(f"{pad} {name}: {_compact(member)}{comma}")
    lines.append(f"{pad}}}")
    return lines


def _compact(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def parse_lock(data: bytes | str, where: str) -> Lock:
    """Read the text of a lock; `where` names it in messages."""
    try:
        schema = decode_json(data, _Header).schema
    except msgspec.MsgspecError as error:
        raise LockError(
            f"{where} is not a lock: {error}. Fix: restore the file, or make it again with `xrt lock`"
        ) from None
    if schema != SCHEMA:
        raise LockError(_other_schema(where, schema))
    try:
        lock = decode_json(data, Lock)
        lock = msgspec.structs.replace(lock, identity=lock.identity.ungrouped())
    except msgspec.MsgspecError as error:
        raise LockError(
            f"{where} is a damaged lock: {error}. Fix: restore the file, or make it again with `xrt lock`"
        ) from None
    for name, part, stated in (
        ("identity", lock.identity, lock.digest),
        ("section measured", lock.measured, lock.measured_digest),
    ):
        digest = digest_of_part(part)
        if stated is not msgspec.UNSET and not hmac.compare_digest(digest.encode(), stated.encode()):
            raise LockError(
                f"{where} was edited: its {name} has the digest {digest}, and the file states {stated}. "
                f"Fix: restore the file, or make it again with {_command(lock, where)}"
            )
    wrong = contradiction(lock.identity) or contradiction_of_figures(lock.measured)
    if wrong:
        raise LockError(
            f"{where} is a damaged lock: {wrong}. Fix: restore the file, or make it again with {_command(lock, where)}"
        )
    return lock


def _command(lock: Lock, where: str) -> str:
    """Return the command that makes a lock again; `where` may be no path."""
    model = lock.identity.model
    if model is None or kind_of(where) != "file":
        return "`xrt lock`"
    command = f"xrt lock {shlex.quote(model.name)} -o {shlex.quote(where)}"
    return f"`{command}` and the options of the first time"


def _other_schema(where: str, schema: str) -> str:
    prefix = SCHEMA.rpartition("/")[0] + "/"
    version = schema.removeprefix(prefix)
    if schema.startswith(prefix) and version.isascii() and version.isdecimal() and len(version) < 7:
        later = int(version) > _LAST_VERSION
        fix = "upgrade xpuruntime, or make the lock again" if later else "make it again with `xrt lock`"
        return f"{where} has the schema {schema}, and this release reads {SCHEMA}. Fix: {fix}"
    fix = "name a lock, such as `xrt lock model.onnx -o model.lock` writes"
    return f"{where} is not a lock: its schema is {schema[:60]!r}, and that of a lock is {SCHEMA!r}. Fix: {fix}"


def load_lock(path: str | os.PathLike[str]) -> Lock:
    """Read the file of a lock.

    Raises
    ------
    LockError
        It is cut off, was edited, is no lock, or is of another release.
    InputError
        The file cannot be read.
    """
    source = user_path(path, "the lock")
    try:
        data = read_regular(source, MAX_LOCK)
    except OSError as error:
        near = nearest(source.name, [beside.name for beside in source.parent.glob("*.lock")][:1000])
        fix = "give the path of a file that `xrt lock` wrote"
        if isinstance(error, FileNotFoundError) and near is not None:
            fix = f"name '{source.with_name(near)}'"
        raise InputError(f"cannot read the lock '{source}': {reason_of(error)}. Fix: {fix}") from error
    return parse_lock(data, str(source))


def model_beside(lock: Lock, where: Path) -> Path:
    """Return the model of a lock: the file of that name in the lock's folder. Raises `InputError` without one."""
    model = lock.identity.model
    if model is None or lock.identity.subject != "inference":
        raise InputError(f"{where} is a lock of {lock.identity.subject}, which no model file belongs to")
    path = where.parent / Path(model.name).name
    if kind_of(path) != "file":
        raise InputError(
            f"the locked model {path.name!r} is not beside {where}", fix="name it with --model, or the argument model"
        )
    return path


def save_lock(lock: Lock, path: str | os.PathLike[str]) -> Path:
    """Write the file of a lock: readers see the old one or the new one, also where the writer is killed."""
    target = user_path(path, "the lock")
    try:
        replace_file(target, lock_bytes(lock), private=False)
    except OSError as error:
        raise _unwritable(target, error) from error
    return target


def check_lock_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a path where no lock can be written, before any work is done for it. Raises `InputError`."""
    target = user_path(path, "the lock")
    try:
        check_writable(target)
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(target: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write the lock '{target}': {reason_of(error)}. Fix: give a path in a folder that exists, is writable "
        "and has room"
    )


#: The schema of models that were exported before locks had one format; they are still read.
_BEFORE = "xpuruntime.export/1"
_SHA256 = "sha256:"


class ExportLock(msgspec.Struct, frozen=True, kw_only=True):
    """What a model was exported from: a view of a `Lock` whose subject is ``"export"``."""

    torch: str
    xpuruntime: str
    exporter: str
    opset: int
    weights: str
    device: str
    device_name: str = ""
    arch: str = ""
    kernels: tuple[CallEntry, ...] = ()

    def to_lock(self) -> Lock:
        """Return it as a lock, in the one format that locks have."""
        facts: dict[tuple[ValidatorKind, str], Any] = {
            (ValidatorKind.DEVICE, self.device): {"arch": self.arch, "name": self.device_name},
            (ValidatorKind.ENGINE, "torch"): {"version": self.torch},
            (ValidatorKind.PACKAGE, "xpuruntime"): self.xpuruntime,
        }
        validators = tuple(
            Validator(id=stable_id(kind, key), kind=kind, key=key, expect=value)
            for (kind, key), value in sorted(facts.items())
        )
        ids = tuple(validator.id for validator in validators)
        weights, kind = self.weights.removeprefix(_SHA256), "onnx" if self.opset else "pt2"
        return Lock.of(
            Identity(
                subject="export",
                model=LockedModel(name="", format=kind, sha256="", initializers_sha256=weights),
                validators=validators,
                calls=tuple(msgspec.structs.replace(kernel, depends_on=ids) for kernel in self.kernels),
            ),
            provenance=Provenance(version=self.xpuruntime, facts={"exporter": self.exporter, "opset": str(self.opset)}),
        )

    @classmethod
    def from_lock(cls, lock: Lock, where: str) -> ExportLock:
        """Return the view of a lock. Raises `LockError` where it is none of an export."""
        identity = lock.identity
        validators = {validator.kind: validator for validator in identity.validators}
        device, engine, package = (
            validators.get(kind) for kind in (ValidatorKind.DEVICE, ValidatorKind.ENGINE, ValidatorKind.PACKAGE)
        )
        opset = lock.provenance.facts.get("opset", "")
        if identity.subject != "export" or identity.model is None or not opset.isdecimal() or len(opset) > 6:
            raise LockError(
                f"the lock in {where!r} is of {identity.subject}, not of an export. Fix: export the model again"
            )
        if device is None or engine is None or package is None or not isinstance(device.expect, dict):
            raise LockError(f"the lock in {where!r} lacks a validator. Fix: export the model again")
        version = engine.expect.get("version") if isinstance(engine.expect, dict) else engine.expect
        return cls(
            torch=str(version),
            xpuruntime=str(package.expect),
            exporter=lock.provenance.facts.get("exporter", ""),
            opset=int(opset),
            weights=_SHA256 + identity.model.initializers_sha256,
            device=device.key,
            device_name=str(device.expect.get("name", "")),
            arch=str(device.expect.get("arch", "")),
            kernels=tuple(msgspec.structs.replace(call, depends_on=()) for call in identity.calls),
        )

    def to_json(self) -> str:
        """Return the lock as JSON text on one line."""
        return msgspec.json.encode(self.to_lock().filed(), order="sorted").decode()

    @classmethod
    def from_json(cls, text: str, where: str) -> ExportLock:
        """Read what `to_json` wrote, or what earlier releases did; `where` names the model in messages."""
        try:
            schema = decode_json(text, _ExportHeader).schema
            if schema == _BEFORE:
                return decode_json(text, cls)
        except msgspec.MsgspecError as error:
            raise LockError(f"the lock in {where!r} cannot be read: {error}. Fix: export the model again") from None
        return cls.from_lock(parse_lock(text, f"the lock in {where!r}"), where)


class _ExportHeader(msgspec.Struct):
    schema: str = ""


def locked_kernels(decisions: Iterable[Any], device: str) -> tuple[CallEntry, ...]:
    """Return the kernels of decisions that were made on a device outside of any backward, each once."""
    entries: dict[tuple[str, ...], CallEntry] = {}
    for decision in decisions:
        if decision.count and decision.device == device and decision.phase != "backward":
            entry = CallEntry(op=decision.op, dtype=decision.dtype, kernel=decision.kernel, module=decision.module)
            entries.setdefault((decision.op, decision.dtype, decision.kernel, decision.module), entry)
    return tuple(entries.values())


_STATEMENT = "https://in-toto.io/Statement/v1"
_LOCK = "https://xpuruntime.dev/attestation/lock/v1"


def statement_text(predicate_type: str, subjects: Sequence[dict[str, Any]], predicate: dict[str, Any]) -> str:
    """Return the JSON text of a statement."""
    statement = {"_type": _STATEMENT, "subject": subjects, "predicateType": predicate_type, "predicate": predicate}
    return printable(json.dumps(statement, indent=2, ensure_ascii=False)) + "\n"


def descriptor(path: str, digest: str) -> dict[str, Any]:
    """Return the resource descriptor of a file: its name without the folder, and its SHA-256."""
    return {"name": printable(PurePath(path).name or path), "digest": {"sha256": digest.removeprefix("sha256:")}}


def lock_statement(lock: Lock, path: str) -> str:
    """Return the JSON text of the statement; its subjects are the lock, the model and its external data."""
    identity = lock.identity
    subjects = [descriptor(path, hashlib.sha256(lock_bytes(lock)).hexdigest())]
    if identity.model is not None:
        subjects.append(descriptor(identity.model.name, identity.model.sha256))
        subjects += [
            {"name": printable(name), "digest": {"sha256": sha256}} for name, sha256 in identity.model.external.items()
        ]
    plan, policy = identity.plan, identity.policy
    predicate: dict[str, Any] = {
        "lock": lock.digest,
        "engine": None if plan is None else plan.engine,
        "device": None if plan is None else plan.device,
        "policy": None if policy is None else {"sha256": policy.sha256},
        "validators": [
            {"kind": validator.kind, "key": printable(validator.key), "expect": validator.expect}
            for validator in identity.validators
        ],
        "units": {
            "observed": len(identity.entries) - identity.unobservable,
            "unobservable": identity.unobservable,
        },
        "accepted": [
            {"code": acceptance.code, "why": printable(acceptance.why)} for acceptance in lock.provenance.accepted
        ],
    }
    return statement_text(_LOCK, subjects, predicate)
