# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Two environments compared where a side is a lock: the levels of recorded sides."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from xpuruntime.engines.registry import read_model
from xpuruntime.errors import InputError
from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.tolerances import samples_agree
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.inference.locked import shapes_that_fit
from xpuruntime.lockfile.differences import compare_identities, compare_stated
from xpuruntime.lockfile.drift import DriftCode
from xpuruntime.lockfile.engine_dependencies import of_kernel
from xpuruntime.lockfile.records import Identity, Lock, LockedOutput, UnitEntry
from xpuruntime.lockfile.rules import policy_of
from xpuruntime.locks.diff.result import Diff, Level, RecordedSide, narrowed, of_lock, of_report, restoring
from xpuruntime.locks.environments import FileSide, LockSide, PythonSide, call, start_worker
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays

_PLACEMENT = (DriftCode.PLACEMENT, DriftCode.FUSION, DriftCode.GONE, DriftCode.NEW)
_KERNELS = (
    DriftCode.KERNEL,
    DriftCode.CONFIGURATION,
    DriftCode.PRECISION,
    DriftCode.ACCUMULATE,
    DriftCode.LAYOUT,
    DriftCode.UNOBSERVABLE,
)
#: Validators that a note names.
_NAMED = 6


def locked_levels(before: RecordedSide, after: RecordedSide) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    """Return the levels of a difference between two sides as a lock has them, and notes on what was not compared."""
    sides = narrowed(before, after), narrowed(after, before)
    identity, other = (side.identity for side, _ in sides)
    drifts = [
        drift
        for drift in compare_identities(identity, other)
        if not _of_kernels_that_did_not_run(drift, identity, other)
    ]
    environment = tuple(_environment_row(drift) for drift in drifts if drift.validator)
    keys = _key_rows(identity, other)
    plan = (*keys, *_plan_rows(drifts, environment, keys))
    rows = _Rows(identity, other, drifts, environment, keys)
    notes = tuple(
        f"{side.name} does not record {', '.join(untold[:_NAMED])}"
        + (f" and {len(untold) - _NAMED} more validators" if len(untold) > _NAMED else "")
        + ": not compared"
        for (_, untold), side in zip(sides, (after, before), strict=True)
        if untold
    )
    levels = (
        _level("environment", environment),
        _level("plan", plan),
        _level("placement", rows.of(_PLACEMENT, calls=False)),
        _kernels(rows, identity, other),
        _numerics(before, after, rows),
        _time(before, after),
    )
    return levels, notes


def _of_kernels_that_did_not_run(drift: Difference, identity: Identity, other: Identity) -> bool:
    if all(any(validator.id == drift.validator for validator in side.validators) for side in (identity, other)):
        return False
    kernels = {*identity.kernels, *other.kernels}
    return drift.code == DriftCode.KERNEL_SOURCE or (
        drift.code == DriftCode.LIBRARY and any(of_kernel(drift.subject, kernel) for kernel in kernels)
    )


def _level(name: str, rows: Sequence[Difference]) -> Level:
    return Level(name=name, verdict="differs" if rows else "same", rows=tuple(rows))


def _environment_row(drift: Difference) -> Difference:
    return msgspec.structs.replace(drift, subject=f"{drift.code}.{drift.subject}", code="")


def _key_rows(identity: Identity, other: Identity) -> tuple[Difference, ...]:
    return tuple(
        msgspec.structs.replace(drift, code="policy key") for drift in compare_stated(identity.policy, other.policy)
    )


def _plan_rows(
    drifts: Sequence[Difference], environment: tuple[Difference, ...], keys: tuple[Difference, ...]
) -> tuple[Difference, ...]:
    """Return what differs in the plan, which follows from the environment and from stated keys; and the shapes."""
    causes = tuple(row.subject for row in (*environment, *keys))
    restore = restoring(causes, (*environment, *keys))
    return tuple(
        drift if drift.code == DriftCode.SHAPES else msgspec.structs.replace(drift, causes=causes, restore=restore)
        for drift in drifts
        if drift.code in (DriftCode.PLAN, DriftCode.SHAPES)
    )


class _Rows:
    """Rows of entries, each with those validators that it depends on and that differ."""

    def __init__(
        self,
        before: Identity,
        other: Identity,
        drifts: Sequence[Difference],
        environment: tuple[Difference, ...],
        keys: tuple[Difference, ...],
    ) -> None:
        self._drifts, self._all, self._keys = drifts, (*environment, *keys), tuple(row.subject for row in keys)
        self._calls = {call.name for identity in (before, other) for call in identity.calls}
        self._changed = {d.validator: f"{d.code}.{d.subject}" for d in drifts if d.validator}
        self._units: dict[str, UnitEntry] = {}
        self._depends: dict[str, set[str]] = {}
        for identity in (other, before):
            self._units |= {entry.unit: entry for entry in identity.entries}
            for name, ids in (
                *((entry.unit, entry.depends_on) for entry in identity.entries),
                *((entry.name, entry.depends_on) for entry in identity.calls),
            ):
                self._depends.setdefault(name, set()).update(ids)

    def of(self, codes: tuple[DriftCode, ...], *, calls: bool | None = None) -> tuple[Difference, ...]:
        """Return the rows of some codes: of units, of calls that xpuruntime dispatched, or of both."""
        return tuple(
            self._row(drift)
            for drift in self._drifts
            if drift.code in codes
            and not drift.validator
            and (calls is None or (drift.subject in self._calls) == calls)
        )

    def _row(self, drift: Difference) -> Difference:
        name = drift.entries[0] if drift.entries else drift.subject
        entry = self._units.get(name)
        causes, restore = self.caused(self._depends.get(name, set()))
        nodes = () if entry is None else entry.sources
        return msgspec.structs.replace(drift, nodes=nodes, causes=causes, restore=restore)

    def caused(self, depends_on: set[str] | None = None) -> tuple[tuple[str, ...], str]:
        wanted = set().union(*self._depends.values()) if depends_on is None else depends_on
        causes = (*(row for id, row in self._changed.items() if id in wanted), *self._keys)
        return causes, restoring(causes, self._all)


def _kernels(rows: _Rows, base: Identity, other: Identity) -> Level:
    changed = (*rows.of(_KERNELS), *rows.of(_PLACEMENT, calls=True))
    silent, units = max(
        (identity.unobservable, sum(entry.relation != "folded" for entry in identity.entries))
        for identity in (base, other)
    )
    reason = ""
    if silent:
        held = "differs" if rows.caused()[0] else "is the same"
        reason = f"the engine does not report the kernels of {silent} of {units} units; what they depend on {held}"
    if (not changed and units and silent == units) or (changed and all(row.code == "unobservable" for row in changed)):
        return Level(name="kernels", verdict="unobservable", reason=reason, rows=changed)
    return Level(name="kernels", verdict="differs" if changed else "same", reason=reason, rows=changed)


def _numerics(before: RecordedSide, after: RecordedSide, rows: _Rows) -> Level:
    sides = [{output.name: output for output in side.identity.outputs} for side in (before, after)]
    for side, outputs in zip((before, after), sides, strict=True):
        if not outputs:
            what = "a report" if side.partial else f"{side.name}"
            return Level(name="numerics", verdict="unobservable", reason=f"{what} has no digests of outputs")
    if before.identity.shapes != after.identity.shapes:
        reason = "the outputs are of inputs of other shapes"
        return Level(name="numerics", verdict="not compared", reason=reason)
    causes, restore = rows.caused()
    changed, untold = [], []
    for name in sorted({*sides[0], *sides[1]}):
        base, other = sides[0].get(name), sides[1].get(name)
        samples = [side.samples.get(name) for side in (before, after)]
        if base is not None and other is not None and "tolerance" == base.grade == other.grade and None in samples:
            untold.append(name)
        elif (said := _output(base, other, samples)) is not None:
            row = Difference(
                subject=f"output {name}", code=said[0], before=said[1], after=said[2], causes=causes, restore=restore
            )
            changed.append(row)
    if untold and not changed:
        reason = f"the bits of {', '.join(untold)} do not repeat, and a side has no samples of them"
        return Level(name="numerics", verdict="unobservable", reason=reason)
    if not changed:
        number = len(sides[0])
        return Level(name="numerics", verdict="same", reason=f"{number} output{'s' * (number > 1)} of probe inputs")
    reason = "a lock has digests: by how much outputs differ, and from which node on, is not observable"
    return Level(name="numerics", verdict="differs", reason=reason, rows=tuple(changed))


def _output(
    output: LockedOutput | None, other: LockedOutput | None, samples: Sequence[tuple[float, ...] | None]
) -> tuple[str, str, str] | None:
    """Return what differs about an output, and both values; ``None`` where it is the same."""
    if output is None or other is None:
        first, second = ("missing" if side is None else "there" for side in (output, other))
        return "", first, second
    if (output.dtype, output.shape) != (other.dtype, other.shape):
        return "type", f"{output.dtype} {list(output.shape)}", f"{other.dtype} {list(other.shape)}"
    if output.grade != other.grade:
        first, second = ("repeats" if side.grade == "bitwise" else "does not repeat" for side in (output, other))
        return "bits", first, second
    if output.grade == "bitwise":
        return None if output.sha256 == other.sha256 else ("bits", output.sha256[:16], other.sha256[:16])
    if samples_agree(samples[0] or (), samples[1] or (), output.rtol, output.atol):
        return None
    return f"beyond rtol {output.rtol:g}, atol {output.atol:g}", "samples", "other samples"


def _time(before: RecordedSide, after: RecordedSide) -> Level:
    """Show what was measured; times of different jobs are not compared."""
    said = "; ".join(
        f"{side.name}: "
        + (
            f"{side.latency_us:,.1f} us{' (bound)' * (side.call == 'bind')}, {side.created}"
            if side.latency_us is not None
            else "no time was measured"
        )
        for side in (before, after)
    )
    reason = f"{said}. Times that were measured at different times are not compared; give two interpreters"
    return Level(name="time", verdict="not compared", reason=reason)


def compare_with_lock(
    sides: Sequence[FileSide | LockSide | PythonSide],
    model: str | os.PathLike[str] | None,
    *,
    inputs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Diff:
    """Say what differs between two sides of which one is a lock."""
    read = {index: side.lock() for index, side in enumerate(sides) if isinstance(side, LockSide)}
    first, lock = next(iter(read.items()))
    like = lock.identity
    recorded_sides: list[RecordedSide] = []
    with ScratchFolder("diff") as folder:
        for position, side in enumerate(sides):
            if isinstance(side, LockSide):
                recorded_sides.append(of_lock(side.name, read[position]))
                continue
            if like.subject != "inference":
                msg = f"a lock of {like.subject} can be compared with another lock alone. Fix: give two locks"
                raise InputError(msg)
            if isinstance(side, FileSide):
                recorded_sides.append(of_report(side.name, side.report(), like))
            else:
                assert model is not None
                recorded_sides.append(
                    _locked_there(side, model, sides[first].name, like, inputs, arguments, Path(folder))
                )
    _check_comparable(recorded_sides)
    levels, notes = locked_levels(*recorded_sides)
    return Diff(
        before=sides[0].name,
        after=sides[1].name,
        model=os.fspath(model) if model is not None else like.model.name if like.model is not None else "",
        levels=levels,
        notes=notes,
    )


def _locked_there(
    side: PythonSide,
    model: str | os.PathLike[str],
    where: str,
    like: Identity,
    inputs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    folder: Path,
) -> RecordedSide:
    stated = dict(arguments)
    if like.policy is not None and all(
        stated.get(name) is None for name in ("policy", "device", "engine", "precision")
    ):
        stated["policy"] = policy_of(like.policy, where).to_dict()
    written = None
    if inputs is not None:
        written = str(folder / "inputs")
        write_arrays(Path(written), inputs)
    elif like.shapes:
        stated["shapes"] = shapes_that_fit(read_model(model), dict(like.shapes[0].inputs)) or None
    path = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
    with start_worker(side, folder) as worker:
        plain = call(worker, side.name, "lock", model=path, inputs=written, arguments=stated)
    return of_lock(side.name, msgspec.convert(plain, Lock))


def _check_comparable(recorded: Sequence[RecordedSide]) -> None:
    """Refuse locks of different subjects, and of models that have nothing in common."""
    first, other = (side.identity for side in recorded)
    if first.subject != other.subject:
        msg = (
            f"'{recorded[0].name}' is a lock of {first.subject}, '{recorded[1].name}' of {other.subject}: give two of "
            "one kind"
        )
        raise InputError(msg)
    nodes = [
        {node for entry in side.entries for node in entry.sources} | {call.node or call.op for call in side.calls}
        for side in (first, other)
    ]
    if all(nodes) and nodes[0].isdisjoint(nodes[1]):
        msg = f"'{recorded[0].name}' and '{recorded[1].name}' are of different models and have no source node in common"
        raise InputError(f"{msg}. Fix: give two locks of one model")
