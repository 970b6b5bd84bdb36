# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`lock`: make a lock, or compare and upgrade one that is there, entry by entry."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.argument_types import ARRAYS, COUNTS, FLAG, MAPPING, NAMES, TEXT, check_types
from xpuruntime.errors import InputError
from xpuruntime.evidence.difference import Difference
from xpuruntime.files.paths import kind_of, user_path
from xpuruntime.inference.session_arguments import refuse_arguments
from xpuruntime.lockfile.canonical import check_lock_writable, load_lock, save_lock
from xpuruntime.lockfile.differences import compare_identities
from xpuruntime.lockfile.drift import DriftCode, ValidatorKind, drift_error, lacking, shown
from xpuruntime.lockfile.records import AcceptedDrift, Lock, utc_now
from xpuruntime.lockfile.rules import policy_of
from xpuruntime.locks.create import create_lock
from xpuruntime.policies.document import did_you_mean
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from xpuruntime.evidence.records import Observation
    from xpuruntime.inference.session_arguments import PolicyLike

#: Kinds of validators that an upgrade of a package may change.
_OF_PACKAGES = (
    DriftCode.ENGINE,
    DriftCode.LIBRARY,
    DriftCode.PACKAGE,
    DriftCode.KERNEL_SOURCE,
    DriftCode.ADAPTER,
    DriftCode.CANARY,
)
#: Of entries and outputs: what follows from a change of the surroundings.
_FOLLOWS = frozenset(DriftCode).difference(ValidatorKind, (DriftCode.SHAPES,))


class LockResult(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """A lock, what differs from the one before, and whether it was written.

    Attributes
    ----------
    lock : Lock
        The one that holds now: the old one where nothing differs.
    path : str
        The file; empty where none was asked for.
    drifts : tuple of Difference
        Differences from the lock that was there.
    lacking : tuple of Difference
        What computes here and is not in the lock that was there, which an earlier release made; `upgrade` adds it.
    written : bool
    changed : bool
        Whether the file is another one now, or would be without ``dry_run``.
    deviations : tuple of Observation
        The keys of the policy that were not honoured in the run that was locked, as ``xrt explain`` shows them.
    """

    lock: Lock
    path: str = ""
    drifts: tuple[Difference, ...] = ()
    lacking: tuple[Difference, ...] = ()
    written: bool = False
    changed: bool = False
    deviations: tuple[Observation, ...] = ()

    @property
    def headline(self) -> str:
        """The file and what became of it in a few words; that the policy was not honoured, where it was not."""
        outcome = "does not hold" if self.drifts else "holds"
        if self.changed:
            outcome = "written" if self.written else "would be written"
        number = len(self.deviations)
        told = f", with {number} deviation{'' if number == 1 else 's'} from the policy" if number else ""
        return f"{self.path}: {outcome}{told}" if self.path else f"locked{told}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, without the lock itself."""
        identity = self.lock.identity
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {
            "schema": "xpuruntime.lock.result/1",
            "digest": self.lock.digest,
            "units": len(identity.entries),
            "unobservable": identity.unobservable,
            "random_outputs": [output.name for output in identity.outputs if output.grade == "random"],
            "validators": len(identity.validators),
            "doubts": list(self.lock.measured.doubts),
            **{name: value for name, value in plain.items() if name != "lock"},
        }

    def __rich__(self) -> RenderableType:
        """Return what became of the lock, what it has, and what differs."""
        from rich.text import Text

        identity, measured = self.lock.identity, self.lock.measured
        lines = [
            self.headline,
            f"  {self.lock.digest}",
            f"  {identity.counts}; they depend on {len(identity.validators)} facts of libraries and machine",
            *(
                f"  deviation: {seen.key}: requested {seen.requested}; the lock holds what ran, {seen.observed}"
                for seen in self.deviations
            ),
        ]
        if measured.batches:
            listed = ", ".join(f"{time_.rows} in {time_.median_us:,.0f} us" for time_ in measured.batches)
            lines.append(f"  batches: {listed}")
        if identity.unobservable:
            lines.append(
                f"  unobservable: the kernels of {identity.unobservable} unit(s) are not reported; only these facts "
                "stand for them"
            )
        if identity.random_outputs:
            lines.append(f"  not locked: values of {identity.random_outputs}, which depend on random numbers")
        lines += [f"  {doubt}" for doubt in measured.doubts]
        lines += [f"  {drift.text if self.changed else drift}" for drift in self.drifts]
        lines += [
            f"  not in the lock: {missing.code} {missing.subject}, {missing.after}; --upgrade adds it"
            for missing in self.lacking
        ]
        if self.drifts and not self.changed:
            codes = " ".join(f"--accept {code}" for code in dict.fromkeys(drift.code for drift in self.drifts))
            lines.append(f"  take what is here with --upgrade, or with {codes} --why TEXT")
        return Text("\n".join(lines))


def lock(
    model: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    batches: Sequence[int] = (),
    call: str | None = None,
    check: bool = False,
    upgrade: bool = False,
    upgrade_units: Sequence[str] = (),
    upgrade_packages: Sequence[str] = (),
    accept: Sequence[str] = (),
    why: str = "",
    dry_run: bool = False,
    note: str = "",
    command: str = "xpuruntime.lock",
    **options: Any,
) -> LockResult:
    """Lock a model under a policy: what was planned, what was observed, and all that both depend on.

    Where the file is there and still holds, it is left as it is. Where it does not hold, it is left as it is too and
    every difference is named, unless the difference is asked for or accepted.

    Parameters
    ----------
    model : str or path
    policy : Policy, path, mapping, or ``"auto"``, optional
        Default: that of the lock that is there.
    output : str or path, optional
        The file to write; default: none, the lock is returned alone.
    shapes : mapping of str to sequence of int, optional
        Of inputs; default: those of the lock that is there where they fit the model, else the smallest.
    inputs : mapping of str to array, optional
        What the instrumented run is made with; default: probe inputs.
    batches : sequence of int
        Batch sizes that are timed, and for the largest of which memory is measured, for servers: see ``slo`` and
        ``memory.budget`` of ``serve.yaml``. Default: those of the lock that is there, where it is made anew.
    call : {"run", "bind"}, optional
        Whether `latency_us` is of plain or of bound runs. Default: as in the lock that is there, else plain ones.
    check : bool
        Write nothing and return the differences.
    upgrade : bool
        Take everything that is here, and measure again what the policy's section ``verify`` asks for.
    upgrade_units : sequence of str
        Patterns of units or source nodes whose entries may change.
    upgrade_packages : sequence of str
        Packages whose version may change, with what depends on it.
    accept : sequence of str
        Codes of differences that are accepted, such as ``"driver"``; needs `why`, and both are kept in the lock.
    why : str
    dry_run : bool
        Write nothing, and return the differences that would be written.
    note : str
        Kept in the lock.
    command : str
        What makes the lock; kept in it.
    **options
        As `InferenceSession` takes them: ``device``, ``engine``, ``precision``, ``calibration``, ``trust``, …

    Returns
    -------
    LockResult

    Raises
    ------
    LockError
        The lock that is there does not hold, and the differences were neither asked for nor accepted.
    InputError
        The file cannot be read or written; a code is none; `accept` without `why`.
    XpuRuntimeError
        As `InferenceSession`.

    Examples
    --------
    >>> import tempfile, xpuruntime as xrt
    >>> path = tempfile.mkdtemp() + "/digits.lock"
    >>> xrt.lock(xrt.demo_model_path(), {"execution": {"engine": "onnxruntime", "device": "cpu"}}, path).written
    True
    >>> with xrt.InferenceSession(xrt.demo_model_path(), lock=path) as session:
    ...     session.plan.policy_source
    'lock'
    """
    types = {
        "shapes": MAPPING, "inputs": ARRAYS, "batches": COUNTS, "upgrade_units": NAMES, "upgrade_packages": NAMES,
        "accept": NAMES, "why": TEXT, "note": TEXT, "command": TEXT, "check": FLAG, "upgrade": FLAG, "dry_run": FLAG,
        "call": TEXT,
    }  # fmt: skip
    refuse_arguments(options, policy, ("output", *types), function="lock")
    check_types(types, locals(), optional=("shapes", "inputs", "call"))
    _check_codes(accept, why)
    path = None if output is None else user_path(output, "the lock")
    folder = "" if path is None else os.path.dirname(path)  # noqa: PTH120 - of a path as it was given
    old = load_lock(path) if path is not None and kind_of(path) == "file" else None
    if path is not None and not check and not dry_run:
        check_lock_writable(path)
    if old is None:
        if check:
            raise InputError(f"there is no lock '{path}' to check. Fix: make it with `xrt lock`")
        provenance, deviations = create_lock(
            model, policy, shapes=shapes, inputs=inputs, command=command, batches=batches, call=call or "run",
            folder=folder, **options,
        )  # fmt: skip
        provenance = _with_provenance(provenance, note=note)
        return _written(LockResult(lock=provenance, deviations=deviations), path, dry_run=dry_run)
    if old.identity.subject != "inference" or old.identity.policy is None:
        raise InputError(f"'{path}' is a lock of {old.identity.subject}, not of inference. Fix: give another file")
    if policy is None and not any(options.get(name) is not None for name in ("device", "engine", "precision")):
        policy = policy_of(old.identity.policy, str(path))
    kept = (
        []
        if upgrade
        else [call for call in old.identity.calls if not _matches(upgrade_units, (call.node, call.module))]
    )
    if check and batches:
        raise InputError("check writes nothing, so no batches are timed. Fix: leave one of the two out")
    sizes = batches or [batch.rows for batch in old.measured.batches]
    provenance, deviations = create_lock(
        model,
        policy,
        shapes=shapes,
        inputs=inputs,
        before=dict(old.identity.shapes[0].inputs) if old.identity.shapes else None,
        pins=kept,
        command=command,
        measure=not check,
        batches=() if check else sizes,
        call=call or old.measured.latency_us.get("call", "run"),
        folder=folder,
        **options,
    )
    _check_upgraded(upgrade_units, upgrade_packages, (old, provenance))
    compared = compare_identities(old.identity, provenance.identity)
    unlocked = tuple(drift for drift in compared if lacking(drift))
    drifts = tuple(drift for drift in compared if drift not in unlocked)
    measured = provenance.measured.ratios or provenance.measured.memory_peak is not None or provenance.measured.batches
    if check or (not drifts and not (upgrade and (measured or unlocked or not old.sealed)) and not batches):
        return LockResult(lock=old, path=str(path), drifts=drifts, lacking=unlocked, deviations=deviations)
    refused = [] if upgrade else [
        drift for drift in drifts if not _allowed(drift, drifts, old, upgrade_units, upgrade_packages, accept)
    ]  # fmt: skip
    if refused:
        raise drift_error(str(path), refused, model=str(model), accepted=accept)
    provenance = _with_provenance(provenance, note=note or old.provenance.note)
    if not drifts:
        provenance = _with_provenance(provenance, accepted=old.provenance.accepted)
    if accept:
        now = utc_now()
        accepted = tuple(
            AcceptedDrift(
                code=DriftCode(d.code),
                subject=d.subject,
                expected=shown(d.before),
                found=shown(d.after),
                why=why,
                at=now,
            )
            for d in drifts
            if d.code in accept
        )
        provenance = _with_provenance(provenance, accepted=(*old.provenance.accepted, *accepted))
    return _written(LockResult(lock=provenance, drifts=drifts, deviations=deviations), path, dry_run=dry_run)


def _check_codes(accept: Sequence[str], why: str) -> None:
    for code in accept:
        if code not in list(DriftCode):
            raise InputError(f"{code!r} is not a code of a difference{did_you_mean(code, list(DriftCode), 'codes')}")
    if accept and not why.strip():
        raise InputError("accepting a difference needs a reason, which is kept in the lock. Fix: add --why TEXT")
    if why and not accept:
        raise InputError("a reason is given, and nothing to accept. Fix: add --accept CODE")


def _check_upgraded(units: Sequence[str], packages: Sequence[str], locks: Sequence[Lock]) -> None:
    """Refuse patterns that match no unit or node, and packages that nothing depends on."""
    identities = [lock.identity for lock in locks]
    calls = [name for identity in identities for call in identity.calls for name in (call.node, call.module, call.name)]
    nodes = [name for identity in identities for unit in identity.entries for name in unit.sources]
    entries = [unit.unit for identity in identities for unit in identity.entries]
    for pattern in units:
        if not _matches([pattern], (*calls, *nodes, *_with_parts(entries))):
            names = list(dict.fromkeys(name for name in (*calls, *nodes, *entries) if name))
            some = f"; they have {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else ""
            raise InputError(f"upgrade_units: {pattern!r} matches no unit or node of the lock or the model{some}")
    known = {"xpuruntime"}.union(*(_packages_of(lock) for lock in locks))
    for name in packages:
        if _normalized(name) not in known:
            raise InputError(
                f"upgrade_packages: the lock does not depend on {name!r}{did_you_mean(name, sorted(known), 'packages')}"
            )


def _with_provenance(relocked: Lock, **changes: Any) -> Lock:
    return msgspec.structs.replace(relocked, provenance=msgspec.structs.replace(relocked.provenance, **changes))


def _written(result: LockResult, path: Path | None, *, dry_run: bool) -> LockResult:
    written = path is not None and not dry_run
    if path is not None and written:
        save_lock(result.lock, path)
    return msgspec.structs.replace(
        result, path="" if path is None else str(path), written=written, changed=path is not None
    )


def _with_parts(names: Sequence[str]) -> list[str]:
    return [part for name in names for part in (name, *name.split("+"), *name.split())]


def _matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names if name)


def _allowed(
    drift: Difference,
    drifts: Sequence[Difference],
    old: Lock,
    units: Sequence[str],
    packages: Sequence[str],
    accept: Sequence[str],
) -> bool:
    """Whether a difference was asked for: by its code, its unit, or the package that it follows from."""
    if drift.code in accept:
        return True
    if units and not drift.validator and _matches(units, _with_parts(drift.entries)):
        return True
    if units and drift.code == DriftCode.OUTPUT:
        return any(_matches(units, [part for e in drift.entries for part in (e, *e.split("+"))]) for drift in drifts)
    wanted = {_normalized(name) for name in packages}
    if not wanted:
        return False
    if drift.validator:
        return drift.code in _OF_PACKAGES and bool(wanted & _packages(drift, old))
    return drift.code in _FOLLOWS


def _packages(drift: Difference, old: Lock) -> set[str]:
    if drift.code == DriftCode.PACKAGE:
        return {drift.subject}
    if drift.code in (DriftCode.KERNEL_SOURCE, DriftCode.ADAPTER, DriftCode.CANARY):
        return {"xpuruntime"}
    return _engine_packages(old) | ({drift.subject} if drift.code == DriftCode.ENGINE else set())


def _engine_packages(lock: Lock) -> set[str]:
    packages: set[str] = set()
    for validator in lock.identity.validators:
        if validator.kind == ValidatorKind.ENGINE and isinstance(validator.expect, dict):
            packages |= {validator.key, str(validator.expect.get("package", "")).partition("==")[0]}
    return packages - {""}


def _packages_of(lock: Lock) -> set[str]:
    stated = {validator.key for validator in lock.identity.validators if validator.kind == ValidatorKind.PACKAGE}
    return {_normalized(name) for name in stated | _engine_packages(lock)}


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")
