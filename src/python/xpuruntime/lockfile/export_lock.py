# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ExportLock`: what a model was exported from, as the lock in its metadata has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import LockError
from xpuruntime.files.reading import decode_json
from xpuruntime.lockfile.canonical import parse_lock
from xpuruntime.lockfile.codes import ValidatorKind
from xpuruntime.lockfile.records import CallEntry, Identity, Lock, LockedModel, Provenance, Validator, stable_id

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ExportLock", "locked_kernels"]

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
        ids = tuple(one.id for one in validators)
        weights, kind = self.weights.removeprefix(_SHA256), "onnx" if self.opset else "pt2"
        return Lock.of(
            Identity(
                subject="export",
                model=LockedModel(name="", format=kind, sha256="", initializers_sha256=weights),
                validators=validators,
                calls=tuple(msgspec.structs.replace(one, depends_on=ids) for one in self.kernels),
            ),
            provenance=Provenance(version=self.xpuruntime, facts={"exporter": self.exporter, "opset": str(self.opset)}),
        )

    @classmethod
    def from_lock(cls, lock: Lock, where: str) -> ExportLock:
        """Return the view of a lock. Raises `LockError` where it is none of an export."""
        identity = lock.identity
        found = {one.kind: one for one in identity.validators}
        device, engine, package = (
            found.get(kind) for kind in (ValidatorKind.DEVICE, ValidatorKind.ENGINE, ValidatorKind.PACKAGE)
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
            kernels=tuple(msgspec.structs.replace(one, depends_on=()) for one in identity.calls),
        )

    def to_json(self) -> str:
        """Return the lock as JSON text on one line."""
        return msgspec.json.encode(self.to_lock().filed(), order="sorted").decode()

    @classmethod
    def from_json(cls, text: str, where: str) -> ExportLock:
        """Read what `to_json` wrote, or what earlier releases did; `where` names the model in messages."""
        try:
            schema = decode_json(text, _Header).schema
            if schema == _BEFORE:
                return decode_json(text, cls)
        except msgspec.MsgspecError as error:
            raise LockError(f"the lock in {where!r} cannot be read: {error}. Fix: export the model again") from None
        return cls.from_lock(parse_lock(text, f"the lock in {where!r}"), where)


class _Header(msgspec.Struct):
    schema: str = ""


def locked_kernels(decisions: Iterable[Any], device: str) -> tuple[CallEntry, ...]:
    """Return the kernels of decisions that were made on a device outside of any backward, each once."""
    found: dict[tuple[str, ...], CallEntry] = {}
    for one in decisions:
        if one.count and one.device == device and one.phase != "backward":
            entry = CallEntry(op=one.op, dtype=one.dtype, kernel=one.kernel, module=one.module)
            found.setdefault((one.op, one.dtype, one.kernel, one.module), entry)
    return tuple(found.values())
