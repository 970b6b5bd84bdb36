# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences between locks, and between the entries of a lock and what ran."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from xpuruntime.evidence.difference import Difference
from xpuruntime.lockfile.drift import NOT_IN_LOCK, DriftCode, ValidatorKind, lacking, shown
from xpuruntime.lockfile.engine_dependencies import variables_of, with_thread_counts
from xpuruntime.lockfile.records import (
    SHAPES_ID,
    CallEntry,
    Identity,
    LockedModel,
    LockedOutput,
    LockedPlan,
    LockedPolicy,
    UnitEntry,
    Validator,
)
from xpuruntime.lockfile.validators import validator_drift, within_threads

#: Field of an entry to the code of its drift, in the order in which they are looked at.
_FIELDS = (
    ("on", DriftCode.PLACEMENT),
    ("precision", DriftCode.PRECISION),
    ("accumulate", DriftCode.ACCUMULATE),
    ("layout", DriftCode.LAYOUT),
)
#: Of an output that differs, those that a message names.
_SUSPECTS = 5
_RELOCK = "xrt lock MODEL --upgrade-unit"
#: Kinds of which locks of earlier releases have fewer.
_ADDED = (
    ValidatorKind.LIBRARY, ValidatorKind.PACKAGE, ValidatorKind.COMPILER, ValidatorKind.KERNEL_SOURCE,
    ValidatorKind.ADAPTER, ValidatorKind.CANARY, ValidatorKind.GENERATION, ValidatorKind.TOKENIZER,
)  # fmt: skip


def compare_entries(locked: tuple[UnitEntry, ...], observed: tuple[UnitEntry, ...]) -> tuple[Difference, ...]:
    """Return what differs between the units of a lock and those that ran.

    What the lock has as unobservable differs only where something else is known of it: placement, precision, layout.
    """
    drifts: list[Difference] = []
    before = {(entry.at, entry.unit): entry for entry in locked}
    now = {(entry.at, entry.unit): entry for entry in observed}
    for key, expected in before.items():
        other = now.get(key)
        if other is None:
            drifts.append(_gone(expected, observed))
        else:
            drifts += _compare_unit(expected, other)
    grouped = {source for entry in locked for source in entry.sources}
    for key, other in now.items():
        if key not in before and not grouped.intersection(other.sources):
            drifts.append(_entry_drift(other, DriftCode.NEW, "no such unit", _describe(other)))
    return tuple(drifts)


def _gone(entry: UnitEntry, observed: tuple[UnitEntry, ...]) -> Difference:
    wanted = set(entry.sources)
    others = [other.unit for other in observed if other.at == entry.at and wanted.intersection(other.sources)]
    if others:
        return _entry_drift(entry, DriftCode.FUSION, entry.unit, " | ".join(others))
    return _entry_drift(entry, DriftCode.GONE, _describe(entry), "no such unit")


def _compare_unit(entry: UnitEntry, other: UnitEntry) -> list[Difference]:
    drifts = []
    if entry.kernel != other.kernel and entry.kernel is not None:
        if other.kernel is None:
            drifts.append(_entry_drift(entry, DriftCode.UNOBSERVABLE, entry.kernel, "a kernel that was not reported"))
        else:
            same = entry.kernel.partition("@")[0] == other.kernel.partition("@")[0]
            drifts.append(
                _entry_drift(entry, DriftCode.CONFIGURATION if same else DriftCode.KERNEL, entry.kernel, other.kernel)
            )
    for name, code in _FIELDS:
        before, now = getattr(entry, name), getattr(other, name)
        if before != now:
            drifts.append(_entry_drift(entry, code, shown(before), shown(now)))
    if not drifts and (before := _stands_for(entry)) != (now := _stands_for(other)):
        drifts.append(_entry_drift(entry, DriftCode.FUSION, before, now))
    return drifts


def _stands_for(entry: UnitEntry) -> str:
    sources, outputs = " ".join(entry.sources) or "no node", " ".join(entry.outputs) or "none"
    return f"{entry.op} ({entry.relation}) of {sources}, makes {outputs}"


def _describe(entry: UnitEntry) -> str:
    return f"{entry.op} on {entry.on}"


def _entry_drift(entry: UnitEntry, code: DriftCode, expected: str, observed: str) -> Difference:
    name = entry.unit if entry.at == SHAPES_ID else f"{entry.unit} at {entry.at}"
    take = f"{_RELOCK} {shlex.quote(entry.unit)}"
    fix = f"restore what it depends on (validators {', '.join(entry.depends_on)}), or take it: {take}"
    return Difference(code=code, subject=name, before=expected, after=observed, entries=(entry.unit,), restore=fix)


def compare_plans(locked: LockedPlan, observed: LockedPlan) -> tuple[Difference, ...]:
    """Return what differs between the plan of a lock and one that was made now: one drift for each key."""
    before, now = _keys_of(locked), _keys_of(observed)
    return tuple(
        Difference(
            code=DriftCode.PLAN,
            subject=key,
            before=shown(before.get(key)),
            after=shown(now.get(key)),
            restore="restore the engine and the version of xpuruntime that the lock was made with",
        )
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    )


def _keys_of(plan: LockedPlan) -> dict[str, object]:
    results: dict[str, object] = {"engine": plan.engine, "device": plan.device, "precision": plan.precision}
    results.update({f"settings.{key}": value for key, value in plan.settings.items()})
    results.update({key: f"{resolved} ({level})" for key, resolved, level in plan.controls})
    return results


def compare_stated(locked: LockedPolicy | None, observed: LockedPolicy | None) -> tuple[Difference, ...]:
    """Return a drift for each key that one policy states and the other does not, or states otherwise."""
    if locked is None or observed is None:
        return ()
    drifts = []
    for key in sorted({*locked.stated, *observed.stated}):
        before, now = locked.stated.get(key), observed.stated.get(key)
        if before != now:
            fix = f"state {key}: {before}" if before is not None else f"leave {key} out"
            drifts.append(
                Difference(code=DriftCode.POLICY, subject=key, before=shown(before), after=shown(now), restore=fix)
            )
    return tuple(drifts)


def compare_outputs(
    locked: tuple[LockedOutput, ...], observed: tuple[LockedOutput, ...], suspects: Sequence[str]
) -> tuple[Difference, ...]:
    """Return a drift for each output that is another one than the lock has; `suspects` may be why, the likely first."""
    before = {(output.input, output.at, output.name): output for output in locked}
    now = {(output.input, output.at, output.name): output for output in observed}
    drifts = []
    for key in sorted({*before, *now}):
        locked_output, other = before.get(key), now.get(key)
        if locked_output == other:
            continue
        expected, got = _output(locked_output), _output(other)
        if expected == got and locked_output is not None and other is not None:
            expected, got = f"sha256 {locked_output.sha256[:12]}", f"sha256 {other.sha256[:12]}"
        drifts.append(
            Difference(
                code=DriftCode.OUTPUT,
                subject=key[2],
                before=expected,
                after=got,
                restore=f"restore what it depends on: {_listed(suspects)} may have changed it",
            )
        )
    return tuple(drifts)


def unseen(identity: Identity) -> list[str]:
    """Return what may change outputs where everything that a lock has is the same."""
    blind = [entry.unit for entry in identity.entries if entry.known == "unobservable"]
    texts = [f"the kernel of {name}, which is not reported" for name in blind[:1]]
    if len(blind) > 1:
        texts = [f"the kernels of {len(blind)} units, such as {blind[0]}, which are not reported"]
    return [*texts, "a library whose bytes changed under the same build ID"]


def _listed(suspects: Sequence[str]) -> str:
    tail = f" and {len(suspects) - _SUSPECTS} more" if len(suspects) > _SUSPECTS else ""
    return ", or ".join(suspects[:_SUSPECTS]) + tail


def _output(output: LockedOutput | None) -> str:
    if output is None:
        return "no such output"
    return f"{output.dtype} {list(output.shape)} {output.grade}"


def compare_calls(locked: tuple[CallEntry, ...], observed: tuple[CallEntry, ...]) -> tuple[Difference, ...]:
    """Return what differs between the calls of a lock and those that were dispatched."""
    before = {_call_key(call): call for call in locked}
    now = {_call_key(call): call for call in observed}
    drifts = []
    for key, expected in before.items():
        other = now.get(key)
        if other is None:
            drifts.append(_call_drift(expected, DriftCode.GONE, expected.kernel, "no such call"))
        elif other.kernel != expected.kernel:
            same = expected.kernel.partition("@")[0] == other.kernel.partition("@")[0]
            drifts.append(
                _call_drift(
                    expected, DriftCode.CONFIGURATION if same else DriftCode.KERNEL, expected.kernel, other.kernel
                )
            )
    drifts += [
        _call_drift(call, DriftCode.NEW, "no such call", call.kernel) for key, call in now.items() if key not in before
    ]
    return tuple(drifts)


def _call_key(entry: CallEntry) -> tuple[object, ...]:
    return entry.op, entry.dtype, tuple(sorted(entry.facts.items())), entry.phase, entry.module, entry.node


def _call_drift(entry: CallEntry, code: DriftCode, expected: str, observed: str) -> Difference:
    fix = "restore what it depends on, or make the lock again"
    return Difference(
        code=code, subject=entry.name, before=expected, after=observed, entries=(entry.name,), restore=fix
    )


def compare_identities(old: Identity, new: Identity) -> tuple[Difference, ...]:
    """Return everything that differs between two locks, validators first, and what the older one does not have."""
    before = {validator.id: validator for validator in old.validators}
    now = {validator.id: validator for validator in _with_names_of(before, new.validators)}
    depending, later = old.dependents(), new.dependents()
    drifts: list[Difference] = []
    for validator in sorted({**now, **before}.values(), key=lambda validator: (validator.kind, validator.id)):
        expected, observed = (
            None if at is None else at.expect for at in (before.get(validator.id), now.get(validator.id))
        )
        if validator.kind == ValidatorKind.ENVIRONMENT and validator.id in before and validator.id in now:
            expected, observed = with_thread_counts(
                _read_by(new, validator.key, expected), _read_by(old, validator.key, observed)
            )
        if validator.kind == ValidatorKind.DEVICE and isinstance(expected, dict) and isinstance(observed, dict):
            expected, observed = within_threads(expected, old), within_threads(observed, old)
        if expected == observed:
            continue
        entries = tuple(dict.fromkeys((*depending.get(validator.id, ()), *later.get(validator.id, ()))))
        drift = validator_drift(validator, expected, observed, entries, old)
        if validator.kind == ValidatorKind.DEVICE and isinstance(expected, dict) and isinstance(observed, dict):
            added = {name: value for name, value in observed.items() if name not in expected}
            if {**expected, **added} == observed:
                drift = msgspec.structs.replace(drift, before=NOT_IN_LOCK, after=shown(added), restore="")
        if validator.id not in before:
            nothing = NOT_IN_LOCK if validator.kind in _ADDED else drift.before
            drift = msgspec.structs.replace(drift, before=nothing, restore="")
        drifts.append(drift)
    drifts += _other_format(old.model, new.model)
    drifts += _other_digest(old.policy, new.policy, drifts)
    if old.plan is not None and new.plan is not None:
        plans = compare_plans(old.plan, new.plan)
        follows = any(drift.code == DriftCode.POLICY for drift in drifts)
        drifts += [msgspec.structs.replace(plan, restore="") if follows else plan for plan in plans]
    if old.shapes != new.shapes:
        drifts.append(
            Difference(
                code=DriftCode.SHAPES,
                subject="shapes",
                before=_shapes(old),
                after=_shapes(new),
                restore="give --shapes" if _sized(old) == _sized(new) else "",
            )
        )
    drifts += compare_entries(old.entries, new.entries)
    drifts += compare_calls(old.calls, new.calls)
    suspects = [f"{drift.code} {drift.subject}" for drift in drifts if not lacking(drift)]
    drifts += compare_outputs(old.outputs, new.outputs, suspects or unseen(old))
    return tuple(drifts)


def _with_names_of(before: Mapping[str, Validator], now: Iterable[Validator]) -> Iterator[Validator]:
    """Yield validators, that of a renamed model by the name it had: the name of a file is no fact of a lock."""
    named = next((validator for validator in before.values() if validator.kind == ValidatorKind.MODEL), None)
    for validator in now:
        if named is not None and validator.kind == ValidatorKind.MODEL:
            yield msgspec.structs.replace(named, expect=validator.expect)
        else:
            yield validator


def _read_by(identity: Identity, engine: str, environment: Any) -> dict[str, str]:
    """Return those variables of another lock that the engine and the kernels of a lock read."""
    device = next((validator.key for validator in identity.validators if validator.kind == ValidatorKind.DEVICE), "")
    return variables_of(engine, device, environment, identity.kernels, compiled=identity.compiled)


def _other_format(old: LockedModel | None, new: LockedModel | None) -> tuple[Difference, ...]:
    if old is None or new is None or old.format == new.format:
        return ()
    fix = "restore the file that was locked"
    return (Difference(code=DriftCode.MODEL, subject=old.name, before=old.format, after=new.format, restore=fix),)


def _other_digest(
    old: LockedPolicy | None, new: LockedPolicy | None, drifts: Sequence[Difference]
) -> tuple[Difference, ...]:
    if (
        old is None
        or new is None
        or old.sha256 == new.sha256
        or any(drift.code == DriftCode.POLICY for drift in drifts)
    ):
        return ()
    expected, text = f"sha256 {old.sha256[:12]}", f"sha256 {new.sha256[:12]}"
    fix = "restore the policy that was locked, or make the lock again"
    return (Difference(code=DriftCode.POLICY, subject="its digest", before=expected, after=text, restore=fix),)


def _shapes(identity: Identity) -> str:
    return "; ".join(shown(msgspec.to_builtins(shape.inputs)) for shape in identity.shapes) or "none"


def _sized(identity: Identity) -> set[str]:
    return {name for shape in identity.shapes for name in shape.inputs}
