# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`prove_export`: an export that runs without xpuruntime, compared with the lock that it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.inference.locked import compare_observed, compare_results, probe_at
from xpuruntime.lockfile.codes import DriftCode
from xpuruntime.lockfile.records import utc_now
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim, VerificationResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.native_export.native_config import NativeExporter, NativeRun
    from xpuruntime.lockfile.drift import LockDrift
    from xpuruntime.lockfile.records import Identity, Lock, LockedShapes

__all__ = ["prove_export"]

_FIX = "see the keys of the export that are weakened or lost"


def prove_export(
    exporter: NativeExporter, target: str, folder: Path, lock: Lock, where: str, python: str | None
) -> VerificationResult:
    """Run an export in a fresh interpreter without xpuruntime, and compare outputs and units with a lock."""
    from xpuruntime import __version__

    identity = lock.identity
    if not identity.shapes:
        raise InputError(f"{where} has no shapes, so no inputs can be generated", fix="make the lock again")
    at, job = identity.shapes[0], exporter.job
    try:
        feeds = probe_at(job.request.model, at.inputs)
    except InputError as error:
        raise InputError(
            f"{folder} is written, and cannot be proved: {error.reason}",
            fix="leave prove (--prove) out, and compare its outputs for inputs of your own",
        ) from None
    ran = exporter.run(target, folder, feeds, python)
    claims = (*_surroundings(exporter, ran), *_outputs(lock, at, ran, job.request.model), *_units(identity, at, ran))
    notes = () if ran.observed is None else ran.observed.notes
    return VerificationResult(
        created=utc_now(),
        version=__version__,
        model=job.name,
        lock=where,
        lock_sha256=lock.digest.removeprefix("sha256:"),
        engine=None if identity.plan is None else identity.plan.engine,
        device=job.request.device,
        claims=claims,
        notes=notes,
        facts=ran.facts,
    )


def _claim(id: str, expected: str, found: str, verdict: str, reason: str, *, section: str = "evidence") -> Claim:
    codes = {"pass": ClaimCode.OK, "fail": ClaimCode.LOCK_DIFFERS, "unobservable": ClaimCode.UNOBSERVABLE}
    return Claim(
        id=id,
        section=section,  # type: ignore[arg-type]
        requested=expected,
        observed=found,
        verdict=verdict,  # type: ignore[arg-type]
        code=codes[verdict],
        reason=reason,
        fix=_FIX if verdict == "fail" else None,
    )


def _surroundings(exporter: NativeExporter, ran: NativeRun) -> Iterator[Claim]:
    expected, found = exporter.job.version, ran.facts.get("version", "")
    same = expected == found
    yield _claim("evidence.engine", expected, found, "pass" if same else "fail", "version of the engine")
    wanted = exporter.device_word()
    there = ran.facts.get("device", "")
    yield _claim("evidence.device", wanted, there, "pass" if there == wanted else "fail", "as the engine names it")


def _outputs(lock: Lock, at: LockedShapes, ran: NativeRun, model: ModelInfo) -> Iterator[Claim]:
    locked = tuple(one for one in lock.identity.outputs if one.at == at.id)
    drifts = {one.subject: one for one in compare_results(locked, lock, ran.outputs, at.id, model)}
    for one in locked:
        id = f"accuracy.outputs.{one.name}"
        drift = drifts.pop(one.name, None)
        if drift is not None:
            yield _claim(id, drift.expected, drift.found, "fail", f"{one.grade} for probe inputs", section="accuracy")
        elif one.grade == "random":
            reason = f"random numbers of node {model.random_outputs[one.name]} are in it"
            yield _claim(id, "-", "-", "unobservable", reason, section="accuracy")
        else:
            how = "the same bits" if one.grade == "bitwise" else f"within rtol {one.rtol:g} and atol {one.atol:g}"
            yield _claim(id, one.grade, how, "pass", "of the probe inputs of the lock", section="accuracy")
    for name, drift in drifts.items():
        yield _claim(
            f"accuracy.outputs.{name}", drift.expected, drift.found, "fail", "not in the lock", section="accuracy"
        )
    if not locked:
        reason = "the lock has no outputs: its model takes inputs that cannot be generated"
        yield _claim("accuracy.outputs", "-", "-", "unobservable", reason, section="accuracy")


def _units(identity: Identity, at: LockedShapes, ran: NativeRun) -> Iterator[Claim]:
    entries = [one for one in identity.entries if one.at == at.id]
    if ran.observed is None or not ran.observed.units:
        reason = "the engine did not report what it ran"
        yield _claim("evidence.units", f"{len(entries)} units", "-", "unobservable", reason)
        return
    groups: dict[str, list[LockDrift]] = {}
    for drift in compare_observed(identity, ran.observed.units, ran.observed.decisions, at=at.id):
        groups.setdefault(drift.subject, []).append(drift)
    blind = 0
    for one in entries:
        found = groups.pop(one.unit, [])
        hidden = [drift for drift in found if drift.code == DriftCode.UNOBSERVABLE]
        real = [drift for drift in found if drift.code != DriftCode.UNOBSERVABLE]
        blind += one.known == "unobservable"
        asked = " ".join(part for part in (one.on, one.kernel, one.precision, one.layout) if part)
        id = f"evidence.units.{one.unit}"
        if real:
            text = "; ".join(f"{drift.code}: {drift.expected}, found {drift.found}" for drift in real)
            yield _claim(id, asked, real[0].found, "fail", text)
        elif hidden:
            yield _claim(id, asked, hidden[0].found, "unobservable", "its kernel is not reported here")
        else:
            yield _claim(
                id, asked, "the same", "pass", "placement, precision, layout, fusion and kernel, where reported"
            )
    for subject, found in groups.items():
        text = "; ".join(f"{drift.code}: {drift.expected}, found {drift.found}" for drift in found)
        yield _claim(f"evidence.units.{subject}", found[0].expected, found[0].found, "fail", text)
    if blind:
        reason = f"the engine reports no kernel of {blind} units, in the lock neither"
        yield _claim("evidence.kernels", f"{blind} units", "-", "unobservable", reason)
