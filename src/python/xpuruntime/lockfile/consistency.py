# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Consistency of a lock: records name each other, none is there twice, and facts are of the type of their kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import PolicyError
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.records import (
    CallEntry,
    Identity,
    LockedModel,
    LockedPlan,
    LockedPolicy,
    UnitEntry,
    Validator,
    stable_id,
)
from xpuruntime.lockfile.rules import rules_of_calls

if TYPE_CHECKING:
    from xpuruntime.lockfile.measured import Measured

#: Relations of units that nothing ran for.
NOTHING_RAN = ("folded",)

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
    ValidatorKind.ADAPTER: dict[str, str] | None,
    ValidatorKind.CANARY: dict[str, str] | None,
    ValidatorKind.CPU_ISA: list[str] | None,
    ValidatorKind.ENVIRONMENT: dict[str, str],
    ValidatorKind.PACKAGE: str | dict[str, str] | None,
    ValidatorKind.COMPILER: str | None,
    ValidatorKind.CALIBRATION: dict[str, str | int] | None,
    ValidatorKind.ARTIFACT: str | None,
    ValidatorKind.GENERATION: dict[str, Any],
    ValidatorKind.TOKENIZER: dict[str, str],
}
#: What the engine's validator states ends up in files and commands that run. Versions are an engine's own text.
_FACTS = {"version": re.compile(r"[^\x00-\x1f\x7f]*"), "package": re.compile(r"[\w.-]+==[\w.+!-]+")}
_DEVICE = re.compile(r"[A-Za-z][\w-]*(:[0-9]{1,6})?")
#: Kinds of which a session has one validator each, and what of its plan is the key.
_OF_THE_PLAN = {ValidatorKind.ENGINE: "engine", ValidatorKind.ENVIRONMENT: "engine", ValidatorKind.DEVICE: "device"}
#: Kinds that every lock of a session has: without one of them it would hold for another model, policy or machine.
_OF_EVERY_SESSION = (
    ValidatorKind.MODEL, ValidatorKind.POLICY, ValidatorKind.ENGINE, ValidatorKind.DEVICE, ValidatorKind.ENVIRONMENT,
)  # fmt: skip


def contradiction(identity: Identity) -> str:
    """Return what in a lock contradicts the rest of it or its type, as half a sentence; empty where nothing does."""
    return next(_contradictions(identity), "")


def session_records(identity: Identity) -> tuple[LockedModel, LockedPolicy, LockedPlan] | None:
    """Return model, policy and plan of a lock of a session; ``None`` for a lock of something else."""
    model, policy, plan = identity.model, identity.policy, identity.plan
    if identity.subject != "inference" or model is None or policy is None or plan is None:
        return None
    return model, policy, plan


def contradiction_of_figures(measured: Measured) -> str:
    """Return which measurements of a lock contradict each other, as half a sentence; empty where none do."""
    return next(_of_figures(measured), "")


def _of_figures(measured: Measured) -> Iterator[str]:
    rows = [batch.rows for batch in measured.batches]
    if rows != sorted(set(rows)):
        yield f"its times of batches are not of ascending sizes: {rows[:8]}"
    for batch in measured.batches:
        if batch.longest_us < batch.median_us:
            yield f"the longest of the runs of {batch.rows} rows took less than their median"
    times = measured.latency_us
    stated = [times[name] for name in ("fastest", "p50", "slowest") if name in times]
    if stated != sorted(stated):
        yield f"the times of its runs are not in order: fastest, p50 and slowest are {stated}"
    for name, ratio in measured.ratios.items():
        if not ratio.low <= ratio.ratio <= ratio.high:
            yield f"its ratio {name!r} is outside of the interval that it states"
    yield from _twice("samples of one output", ((sample.at, sample.name) for sample in measured.samples))


def _contradictions(identity: Identity) -> Iterator[str]:
    if identity.subject == "inference" and session_records(identity) is None:
        missing = [name for name in ("model", "policy", "plan") if getattr(identity, name) is None]
        yield f"it is of inference, and has no {missing[0]}"
    if identity.plan is not None and not _DEVICE.fullmatch(identity.plan.device):
        yield f"its plan is on the device {identity.plan.device[:60]!r}, which no device is named"
    yield from _twice("validators of one id", ((validator.id,) for validator in identity.validators))
    for validator in identity.validators:
        yield from _of_validator(validator, identity.plan)
    known = {validator.id for validator in identity.validators}
    depending = [(entry.unit, entry.depends_on) for entry in identity.entries]
    depending += [(call.op, call.depends_on) for call in identity.calls]
    for name, ids in depending:
        missing = [id_ for id_ in ids if id_ not in known]
        if missing:
            yield f"the entry {name!r} depends on the validator {missing[0]!r}, which the lock lacks"
    yield from _of_records(identity)
    for entry in identity.entries:
        yield from _of_entry(entry)
    for call in identity.calls:
        yield from _of_call(call)
    yield from _twice("input shapes of one id", ((shape.id,) for shape in identity.shapes))
    yield from _twice("entries of one unit", ((entry.at, entry.unit) for entry in identity.entries))
    yield from _twice("outputs of one name", ((output.at, output.input, output.name) for output in identity.outputs))
    shapes = {shape.id for shape in identity.shapes}
    placed = [(f"the entry {entry.unit!r}", entry.at) for entry in identity.entries]
    placed += [(f"the output {output.name!r}", output.at) for output in identity.outputs]
    for name, at in placed:
        if at not in shapes:
            yield f"{name} is of the input shapes {at!r}, which the lock lacks"


def _twice(what: str, keys: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for key, count in Counter(keys).items():
        if count > 1:
            yield f"it has two {what}: {' '.join(key)!r}"


def _of_records(identity: Identity) -> Iterator[str]:
    """Yield what a session's lock lacks, and where its records of model and policy differ from their validators."""
    records = session_records(identity)
    if records is None:
        return
    model, policy, plan = records
    kinds = [validator.kind for validator in identity.validators]
    hardware = ValidatorKind.DRIVER if plan.device.startswith("cuda") else ValidatorKind.CPU_ISA
    for kind in (*_OF_EVERY_SESSION, hardware):
        if kinds.count(kind) != 1:
            yield f"it is of inference, and has {kinds.count(kind) or 'no'} validators of {kind}, where one is"
    if not any(
        validator.kind == ValidatorKind.PACKAGE and validator.key == "xpuruntime" for validator in identity.validators
    ):
        yield "it is of inference, and has no validator of the package xpuruntime"
    if not identity.shapes:
        yield "it is of inference, and has no input shapes"
    external = {}
    for validator in identity.validators:
        if validator.kind == ValidatorKind.EXTERNAL_DATA:
            external[validator.key] = validator.expect
        elif validator.kind == ValidatorKind.MODEL and (validator.key, validator.expect) != (
            model.name,
            model_facts(model),
        ):
            yield f"the validator {validator.id!r} is of another model than its record of {model.name[:60]!r}"
        elif validator.kind == ValidatorKind.POLICY and validator.expect != policy.stated:
            yield f"the validator {validator.id!r} is of another policy than the one that is stated"
    if external != model.external:
        yield f"its validators of external data are of other files than its record of {model.name[:60]!r}"


def model_facts(model: LockedModel) -> dict[str, str]:
    """Return what a validator of a model expects."""
    facts = {"sha256": model.sha256}
    if model.graph_sha256:
        facts |= {"graph": model.graph_sha256, "initializers": model.initializers_sha256}
    return facts


def _of_entry(entry: UnitEntry) -> Iterator[str]:
    if entry.kernel is not None and entry.known == "unobservable":
        yield f"the entry {entry.unit!r} has a kernel, and says that none was observed"
    if entry.kernel is None and entry.known == "observed" and entry.relation not in NOTHING_RAN:
        yield f"the entry {entry.unit!r} has no kernel, and says that one was observed"


def _of_call(entry: CallEntry) -> Iterator[str]:
    try:
        rules_of_calls((entry,))
    except (PolicyError, TypeError) as error:
        yield f"the entry {entry.name[:60]!r} of the kernel {entry.kernel[:60]!r} is no rule of a policy: {error}"


def _of_validator(validator: Validator, plan: LockedPlan | None) -> Iterator[str]:
    name = f"the validator {validator.id!r}"
    try:
        msgspec.convert(validator.expect, _EXPECTED[validator.kind])
    except msgspec.ValidationError as error:
        yield f"what {name} of {validator.kind} expects is of another type: {error}"
        return
    if validator.id != stable_id(validator.kind, validator.key):
        yield f"the id of {name} is that of another one than of {validator.kind} {validator.key[:60]!r}"
    if validator.kind == ValidatorKind.DEVICE and not _DEVICE.fullmatch(validator.key):
        yield f"{name} is of the device {validator.key[:60]!r}, which no device is named"
    if validator.kind == ValidatorKind.ENGINE:
        for fact, form in _FACTS.items():
            stated = validator.expect.get(fact)
            if stated is not None and not form.fullmatch(stated):
                yield f"{name} of {validator.kind} expects the {fact} {stated[:60]!r}, which is none"
    if plan is not None and validator.kind in _OF_THE_PLAN:
        planned = getattr(plan, _OF_THE_PLAN[validator.kind])
        if validator.key != planned:
            yield f"{name} is of {validator.kind} {validator.key!r}, and the plan has {planned!r}"
