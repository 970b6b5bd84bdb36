# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RecordedSide`: what a lock has of an environment, from a lock, made in an interpreter, or from a report."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.evidence.report_building import influential_variables
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.engine_dependencies import CORE, compilers_of, packages_of, variables_of
from xpuruntime.lockfile.entries import call_entries, unit_entries
from xpuruntime.lockfile.records import SHAPES_ID, Identity, Lock, LockedPlan, LockedShapes, Validator
from xpuruntime.lockfile.rules import PLACES, policy_record
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xpuruntime.evidence import Report
    from xpuruntime.lockfile.records import CallEntry

__all__ = ["RecordedSide", "narrowed", "of_lock", "of_report"]

#: Settings whose texts name the policy's keys; a lock's plan has rules instead of these.
_NAMING_KEYS = ("rewrites", "left", "tune")


class RecordedSide(NamedTuple):
    """One side, as a lock has it."""

    name: str
    identity: Identity
    samples: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    latency_us: float | None = None
    call: str = "run"
    created: str = ""
    pinned: bool = True
    partial: bool = False


def of_lock(name: str, lock: Lock) -> RecordedSide:
    """Return a lock as a side."""
    measured = lock.measured
    return RecordedSide(
        name=name,
        identity=lock.identity,
        samples={sample.name: sample.values for sample in measured.samples},
        latency_us=measured.latency_us.get("p50"),
        call=measured.latency_us.get("call", "run"),
        created=lock.provenance.created,
    )


def of_report(name: str, report: Report, like: Identity) -> RecordedSide:
    """Return what a report has of the things that a lock has."""
    plan = report.plan
    at = like.shapes[0].id if like.shapes else SHAPES_ID
    entries = unit_entries(report.units, report.decisions, like.validators, at)
    pinned = plan.get("policy_source") == "lock"
    controls = tuple(
        sorted((control["key"], control["resolved"], control["enforceability"]) for control in plan.get("controls", ())
               if control["key"] not in PLACES)
    )  # fmt: skip
    identity = Identity(
        subject="inference",
        policy=None if pinned else policy_record(Policy.coerce(plan.get("policy") or {})),
        plan=LockedPlan(
            engine=plan["engine"],
            device=plan["device"],
            precision=plan["precision"],
            settings=plan.get("settings") or {},
            controls=controls,
        ),
        validators=tuple(_validators(report, like)),
        shapes=_shapes(report, at),
        entries=entries,
        calls=call_entries(report.decisions, like.validators),
    )
    latency = None if report.latency is None else report.latency.median_us
    return RecordedSide(name, identity, latency_us=latency, created=report.created, pinned=pinned, partial=True)


def narrowed(side: RecordedSide, other: RecordedSide) -> tuple[RecordedSide, tuple[str, ...]]:
    """Return a side as far as the other one can be compared with it, and the validators that the other does not have.

    Where one of them is a report, its plan was made of another policy than that of a lock, which has the kernels as
    rules: controls and settings that name these are left out.
    """
    identity = side.identity
    recorded = {validator.id for validator in other.identity.validators}
    kept = [validator for validator in identity.validators if validator.kind != "policy"]
    untold: list[str] = []
    if other.partial:
        untold = [f"{validator.kind} {validator.key}" for validator in kept if validator.id not in recorded]
        kept = [validator for validator in kept if validator.id in recorded]
    plan, their_plan = identity.plan, other.identity.plan
    if plan is not None and their_plan is not None and not (side.pinned and other.pinned):
        shared = {control[0] for control in plan.controls} & {control[0] for control in their_plan.controls}
        plan = msgspec.structs.replace(
            plan,
            settings={name: value for name, value in plan.settings.items() if name not in _NAMING_KEYS},
            controls=tuple(c for c in plan.controls if c[0] in shared and not c[0].startswith("kernels.")),
        )
    return side._replace(identity=msgspec.structs.replace(identity, validators=tuple(kept), plan=plan)), tuple(untold)


def _validators(report: Report, like: Identity) -> Iterator[Validator]:
    """Yield the validators of a lock with what a report has of them; those that it does not tell are left out."""
    for validator in like.validators:
        fact = _told(report, validator)
        if fact is not None:
            yield msgspec.structs.replace(validator, expect=fact)


def _told(report: Report, validator: Validator) -> Any:
    plan, environment = report.plan, report.environment
    execution = plan.get("execution") or {}
    hardware = execution.get("device") or {}
    packages = environment.get("packages") or {}
    if validator.kind == ValidatorKind.ENGINE:
        told: dict[str, Any] = {"version": plan.get("engine_version")}
        name = next((name for name in packages_of(plan["engine"]) if name in packages), None)
        return told if name is None else {**told, "package": f"{name}=={packages[name]}"}
    if validator.kind == ValidatorKind.PACKAGE:
        return packages.get(validator.key)
    if validator.kind == ValidatorKind.MODEL:
        return _file_alone(validator.expect, (plan.get("model") or {}).get("sha256"))
    if validator.kind == ValidatorKind.CPU_ISA:
        features = hardware.get("features") if hardware.get("kind") == "cpu" else None
        return None if features is None else sorted(features)
    if validator.kind == ValidatorKind.DEVICE:
        if hardware.get("kind") != "cpu":
            return None
        facts = {"name": hardware.get("name"), "cores": hardware.get("units")}
        untold = (
            {name: value for name, value in validator.expect.items() if name in ("usable", "quota")}
            if validator.expect
            else {}
        )
        return {**facts, "architecture": hardware.get("architecture"), **untold}
    if validator.kind == ValidatorKind.ENVIRONMENT:
        return _variables(validator, plan, environment.get("variables") or {}, call_entries(report.decisions, ()))
    if validator.kind in (ValidatorKind.LIBRARY, ValidatorKind.KERNEL_SOURCE):
        name = "xpuruntime/_core" if validator.key == CORE else validator.key
        return _library(
            validator.expect, next((lib for lib in execution.get("libraries", ()) if lib["name"] == name), None)
        )
    return None


def _file_alone(expect: Any, sha256: str | None) -> Any:
    """Return the digests of a model whose file has a known digest: where that is the same, so are its parts."""
    if sha256 is None or not isinstance(expect, dict):
        return None
    return expect if expect.get("sha256") == sha256 else {"sha256": sha256}


def _library(expect: Any, library: dict[str, Any] | None) -> Any:
    """Return the identity of a library, where the report has a build ID of it."""
    if library is None or not isinstance(expect, dict) or not library.get("build_id"):
        return None
    return {**expect, **{name: library[name] for name in ("build_id", "size") if name in expect}}


def _variables(
    validator: Validator, plan: dict[str, Any], variables: dict[str, str], calls: Sequence[CallEntry]
) -> dict[str, str] | None:
    if not isinstance(validator.expect, dict) or len(influential_variables(validator.expect)) < len(validator.expect):
        return None  # a report leaves out some of those that the lock has
    compiled = bool(compilers_of(plan.get("settings") or {}, plan["device"]))
    return variables_of(plan["engine"], plan["device"], variables, [call.kernel for call in calls], compiled=compiled)


def _shapes(report: Report, at: str) -> tuple[LockedShapes, ...]:
    """Return the shapes that were run, as far as a report has them as numbers."""
    if report.shapes is None:
        return ()
    shapes: dict[str, tuple[int, ...]] = {}
    for input_ in report.shapes.inputs:
        sizes = [] if input_.observed in ("scalar", "") else input_.observed.split(" x ")
        if not all(size.isdecimal() for size in sizes):
            return ()
        shapes[input_.input] = tuple(map(int, sizes))
    return (LockedShapes(id=at, inputs=shapes),)
