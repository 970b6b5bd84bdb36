# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Consistency of a lock: records name each other, none is there twice, and facts are of the type of their kind."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.lockfile.codes import ValidatorKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from xpuruntime.lockfile.records import Identity, LockedModel, LockedPlan, LockedPolicy, Validator

__all__ = ["contradiction", "session_records"]

#: The type of `Validator.expect` by its kind. ``None``: there was no such thing.
_EXPECTED: dict[ValidatorKind, Any] = {
    ValidatorKind.MODEL: dict[str, str] | None,
    ValidatorKind.EXTERNAL_DATA: str | None,
    ValidatorKind.POLICY: dict[str, str] | None,
    ValidatorKind.DEVICE: dict[str, Any] | None,
    ValidatorKind.DRIVER: dict[str, str] | None,
    ValidatorKind.ENGINE: dict[str, str | None],
    ValidatorKind.LIBRARY: dict[str, str | int] | None,
    ValidatorKind.KERNEL_SOURCE: dict[str, str | int] | None,
    ValidatorKind.CPU_ISA: list[str] | None,
    ValidatorKind.ENVIRONMENT: dict[str, str],
    ValidatorKind.PACKAGE: str | None,
    ValidatorKind.CALIBRATION: dict[str, str | int] | None,
    ValidatorKind.ARTIFACT: str | None,
}
#: What the engine's validator states ends up in files and commands that run. Versions are an engine's own text.
_FACTS = {"version": re.compile(r"[^\x00-\x1f\x7f]*"), "package": re.compile(r"[\w.-]+==[\w.+!-]+")}
_DEVICE = re.compile(r"[A-Za-z][\w-]*(:[0-9]{1,6})?")
#: Kinds of which a session has one validator each, and what of its plan is the key.
_OF_THE_PLAN = {ValidatorKind.ENGINE: "engine", ValidatorKind.ENVIRONMENT: "engine", ValidatorKind.DEVICE: "device"}


def contradiction(identity: Identity) -> str:
    """Return what in a lock contradicts the rest of it or its type, as half a sentence; empty where nothing does."""
    return next(_contradictions(identity), "")


def session_records(identity: Identity) -> tuple[LockedModel, LockedPolicy, LockedPlan] | None:
    """Return model, policy and plan of a lock of a session; ``None`` for a lock of something else."""
    model, policy, plan = identity.model, identity.policy, identity.plan
    if identity.subject != "inference" or model is None or policy is None or plan is None:
        return None
    return model, policy, plan


def _contradictions(identity: Identity) -> Iterator[str]:
    if identity.subject == "inference" and session_records(identity) is None:
        missing = [name for name in ("model", "policy", "plan") if getattr(identity, name) is None]
        yield f"it is of inference, and has no {missing[0]}"
    if identity.plan is not None and not _DEVICE.fullmatch(identity.plan.device):
        yield f"its plan is on the device {identity.plan.device[:60]!r}, which no device is named"
    yield from _twice("validators of one id", ((one.id,) for one in identity.validators))
    for one in identity.validators:
        yield from _of_validator(one, identity.plan)
    known = {one.id for one in identity.validators}
    depending = [(one.unit, one.depends_on) for one in identity.entries]
    depending += [(one.op, one.depends_on) for one in identity.calls]
    for name, ids in depending:
        missing = [one for one in ids if one not in known]
        if missing:
            yield f"the entry {name!r} depends on the validator {missing[0]!r}, which the lock lacks"
    yield from _twice("input shapes of one id", ((one.id,) for one in identity.shapes))
    yield from _twice("entries of one unit", ((one.at, one.unit) for one in identity.entries))
    yield from _twice("outputs of one name", ((one.at, one.input, one.name) for one in identity.outputs))
    shapes = {one.id for one in identity.shapes}
    placed = [(f"the entry {one.unit!r}", one.at) for one in identity.entries]
    placed += [(f"the output {one.name!r}", one.at) for one in identity.outputs]
    for name, at in placed:
        if at not in shapes:
            yield f"{name} is of the input shapes {at!r}, which the lock lacks"


def _twice(what: str, keys: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for key, count in Counter(keys).items():
        if count > 1:
            yield f"it has two {what}: {' '.join(key)!r}"


def _of_validator(one: Validator, plan: LockedPlan | None) -> Iterator[str]:
    name = f"the validator {one.id!r}"
    try:
        msgspec.convert(one.expect, _EXPECTED[one.kind])
    except msgspec.ValidationError as error:
        yield f"what {name} of {one.kind} expects is of another type: {error}"
        return
    if one.kind == ValidatorKind.DEVICE and not _DEVICE.fullmatch(one.key):
        yield f"{name} is of the device {one.key[:60]!r}, which no device is named"
    if one.kind == ValidatorKind.ENGINE:
        for fact, form in _FACTS.items():
            stated = one.expect.get(fact)
            if stated is not None and not form.fullmatch(stated):
                yield f"{name} of {one.kind} expects the {fact} {stated[:60]!r}, which is none"
    if plan is not None and one.kind in _OF_THE_PLAN and one.key != getattr(plan, _OF_THE_PLAN[one.kind]):
        yield f"{name} is of {one.kind} {one.key!r}, and the plan has {getattr(plan, _OF_THE_PLAN[one.kind])!r}"
