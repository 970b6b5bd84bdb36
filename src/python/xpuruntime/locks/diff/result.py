# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RecordedSide`: what a lock has of an environment, from a lock, made in an interpreter, or from a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec

from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.documents import Document
from xpuruntime.evidence.render_text.changes import difference_table
from xpuruntime.evidence.report_building import influential_variables
from xpuruntime.evidence.report_comparison import ReportComparison
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.engine_dependencies import CORE, compilers_of, packages_of, variables_of
from xpuruntime.lockfile.entries import call_entries, unit_entries
from xpuruntime.lockfile.records import SHAPES_ID, CallEntry, Identity, Lock, LockedPlan, LockedShapes, Validator
from xpuruntime.lockfile.rules import PLACES, policy_record
from xpuruntime.measuring.conditions import Conditions
from xpuruntime.measuring.statistics import RatioComparison
from xpuruntime.policies import Policy
from xpuruntime.tables import ROWS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.evidence import Report

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
    if report.shapes is None:
        return ()
    shapes: dict[str, tuple[int, ...]] = {}
    for input_ in report.shapes.inputs:
        sizes = [] if input_.observed in ("scalar", "") else input_.observed.split(" x ")
        if not all(size.isdecimal() for size in sizes):
            return ()
        shapes[input_.input] = tuple(map(int, sizes))
    return (LockedShapes(id=at, inputs=shapes),)


SCHEMA = "xpuruntime.diff/2"
#: The levels in the order in which a cause comes before its effect.
LEVELS = ("environment", "plan", "placement", "kernels", "numerics", "time")


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a difference.

    Attributes
    ----------
    name : str
        One of `LEVELS`.
    verdict : {"same", "differs", "undecided", "unobservable", "not compared"}
    reason : str
        What the verdict does not cover, or why nothing was compared.
    rows : tuple of Difference
    """

    name: str
    verdict: Literal["same", "differs", "undecided", "unobservable", "not compared"]
    reason: str = ""
    rows: tuple[Difference, ...] = ()


class Diff(Document, frozen=True, kw_only=True):
    """What differs between two environments for one model.

    Attributes
    ----------
    schema : str
    before, after : str
        The sides as they were given.
    model : str
    levels : tuple of Level
        In the order of `LEVELS`.
    comparison : ReportComparison or None
        Of the two reports, with everything that they have; ``None`` where a side is a lock.
    speed : RatioComparison or None
        Of interleaved rounds, where both sides are interpreters.
    conditions : Conditions or None
        Of the machine during these.
    notes : tuple of str
    """

    NOUN: ClassVar = "the difference"
    STATED: ClassVar = ("headline", "exit_code")

    schema: str = SCHEMA
    before: str
    after: str
    model: str
    levels: tuple[Level, ...]
    comparison: ReportComparison | None = None
    speed: RatioComparison | None = None
    conditions: Conditions | None = None
    notes: tuple[str, ...] = ()

    def level(self, name: str) -> Level:
        """Return one level."""
        return next(level for level in self.levels if level.name == name)

    @property
    def exit_code(self) -> int:
        """0 the same, 1 a difference from plan to numerics, 4 only time differs or could not be decided.

        Differences of the environment alone, which are why one compares, do not count.
        """
        if any(level.verdict == "differs" for level in self.levels if level.name not in ("environment", "time")):
            return 1
        return 4 if self.level("time").verdict in ("differs", "undecided") else 0

    @property
    def headline(self) -> str:
        """One sentence: which levels differ."""
        differ = [level.name for level in self.levels if level.verdict == "differs"]
        open_ = [level.name for level in self.levels if level.verdict in ("undecided", "unobservable", "not compared")]
        said = f"{', '.join(differ)} {'differs' if len(differ) == 1 else 'differ'}" if differ else "nothing differs"
        return said + (f"; not known: {', '.join(open_)}" if open_ else "")

    def __rich__(self) -> RenderableType:

        return render(self)


_STYLE = {
    "same": "green",
    "differs": "bold yellow",
    "undecided": "yellow",
    "unobservable": "yellow",
    "not compared": "",
}
_HEAD = {0: "bold green", 1: "bold yellow", 4: "bold yellow"}


def render(diff: Diff) -> RenderableType:
    """Return the headline, and the levels with their rows, causes and pins."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(diff.headline, style=_HEAD[diff.exit_code]),
        Text(f"before: {diff.before}, after: {diff.after}, model: {diff.model}"),
    ]
    for number, level in enumerate(diff.levels):
        reason = f": {level.reason}" if level.reason else ""
        parts.append(Text(f"L{number} {level.name}: {level.verdict}{reason}", style=_STYLE[level.verdict]))
        if level.rows:
            parts += _rows(level)
    parts += [Text(f"note: {note}") for note in diff.notes]
    return Group(*parts)


def _rows(level: Level) -> list[RenderableType]:
    from rich.text import Text

    if level.name == "environment":
        return difference_table(level.name, level.rows, "restore", most=ROWS)
    shown = difference_table(level.name, level.rows, most=ROWS)
    for causes, restore in dict.fromkeys((row.causes, row.restore) for row in level.rows):
        cause = f"may be caused by {', '.join(causes)}" if causes else "no difference of the environment explains it"
        shown.append(Text(f"{cause}{f'; restored by {restore}' if restore else ''}"))
    return shown


#: Packages that an engine is made of, by how their names begin; and libraries, by how theirs do.
_PACKAGES = {
    "onnxruntime": ("onnxruntime",),
    "qnn": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt", "nvidia"),
    "torch": ("torch", "nvidia"),
}
_LIBRARIES = {
    "onnxruntime": ("libonnxruntime", "onnxruntime"),
    "qnn": ("libonnxruntime", "onnxruntime", "libQnn"),
    "openvino": ("libopenvino", "libtbb"),
    "tensorrt": ("libnvinfer", "libtensorrt"),
    "torch": ("libtorch", "libc10", "libmkl", "libgomp"),
}
_CUDA = ("libcu", "libnv", "libcudnn")
#: What takes part in every run: it makes the plan and prepares the graph.
_ALWAYS = ("packages.xpuruntime", "packages.onnx", "cpu", "machine", "driver")
_DISTRIBUTION = re.compile(r".*?/(?:site|dist)-packages/")


def environment_rows(comparison: ReportComparison) -> tuple[Difference, ...]:
    """Return what differs in the environment, without paths that differ by the folder of the environment alone."""
    rows = []
    for surrounding in comparison.surroundings:
        if surrounding.subject.startswith("settings.") or surrounding.subject in ("plan.policy_source",):
            continue
        before, after = (
            None if value is None else _DISTRIBUTION.sub("", value) for value in (surrounding.before, surrounding.after)
        )
        if before != after:
            rows.append(Difference(subject=surrounding.subject, before=before, after=after, restore=_pin(surrounding)))
    versions = {(row.before, row.after) for row in rows if row.subject.startswith("packages.")}
    return tuple(row for row in rows if row.subject != "plan.engine_version" or (row.before, row.after) not in versions)


def plan_rows(
    comparison: ReportComparison, defaults: Sequence[dict[str, str]], environment: Iterable[Difference]
) -> tuple[Difference, ...]:
    """Return what differs in the plan: candidate, settings, status of policy keys, defaults of the engine."""
    engine = comparison.after.engine
    causes = possible_causes(environment, engine, comparison.after.device)
    restore = restoring(causes, environment)
    rows = [
        Difference(
            subject=f"plan.{name}", code="chosen", before=before, after=after, restore=f"execution.{name}: {before}"
        )
        for name in ("engine", "device", "precision")
        if (before := getattr(comparison.before, name)) != (after := getattr(comparison.after, name))
    ]
    rows += [
        Difference(subject=surrounding.subject, code="setting", before=surrounding.before,
                after=surrounding.after, causes=causes, restore=restore)
        for surrounding in comparison.surroundings
        if surrounding.subject.startswith("settings.") and surrounding.subject != "settings.computes"
    ]  # fmt: skip
    rows += [
        Difference(
            subject=key.key,
            code="policy key",
            before=f"{key.requested_before or '-'}, {key.status_before or 'not stated'}",
            after=f"{key.requested_after or '-'}, {key.status_after or 'not stated'}",
            causes=causes,
            restore=restore,
        )
        for key in comparison.keys
    ]
    before, after = defaults
    names = dict.fromkeys((*before, *after)) if before and after else {}
    rows += [
        Difference(subject=f"default {name}", code="default", before=before.get(name), after=after.get(name),
                causes=causes, restore=restore)
        for name in names
        if before.get(name) != after.get(name)
    ]  # fmt: skip
    return tuple(rows)


def possible_causes(environment: Iterable[Difference], engine: str, device: str) -> tuple[str, ...]:
    """Return the rows of the environment that can change what an engine does on a device."""
    packages, libraries = _PACKAGES.get(engine, (engine,)), _LIBRARIES.get(engine, (f"lib{engine}",))
    cuda = device.startswith("cuda")
    causes = []
    for row in environment:
        kind, _, name = row.subject.partition(".")
        if (
            row.subject in (*_ALWAYS, "plan.engine_version")
            or (kind == "packages" and name.startswith((*packages, *(("nvidia",) if cuda else ()))))
            or (kind == "libraries" and name.startswith((*libraries, *(_CUDA if cuda else ()))))
            or kind == "variables"
            or (kind == "devices" and name == device)
        ):
            causes.append(row.subject)
    return tuple(causes)


def restoring(causes: Iterable[str], environment: Iterable[Difference]) -> str:
    """Return the pins of several rows as one text."""
    wanted = set(causes)
    return "; ".join(dict.fromkeys(row.restore for row in environment if row.subject in wanted and row.restore))


def _pin(change: Difference) -> str:
    kind, _, name = change.subject.partition(".")
    if kind == "packages":
        return f"pip install {name}=={change.before}" if change.before else f"pip uninstall {name}"
    if kind == "variables":
        return f"export {name}={change.before}" if change.before is not None else f"unset {name}"
    if kind == "driver":
        return f"install the driver of {change.before}" if change.before else ""
    return ""
