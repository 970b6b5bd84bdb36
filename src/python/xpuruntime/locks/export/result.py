# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ExportResult`: the exported files, the outcome of each key of the policy, and the proof that they run the same."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import msgspec

from xpuruntime.engines.native_export.native_config import KeyOutcome, NativeExporter, NativeRun
from xpuruntime.errors import InputError
from xpuruntime.evidence.documents import Document
from xpuruntime.inference.locked import compare_observed, compare_results, probe_at
from xpuruntime.lockfile.drift import DriftCode, shown
from xpuruntime.lockfile.records import Identity, Lock, LockedShapes, utc_now
from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.locks.verification.result import VerificationResult
from xpuruntime.tables import rows_table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.difference import Difference

SCHEMA = "xpuruntime.export.result/1"


class ExportResult(Document, frozen=True, kw_only=True):
    """What `xpuruntime.export_lock` did.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.export.result/1"``.
    target : str
        Such as ``"ort-python"``.
    folder : str
    lock, model : str
        Digest of the lock, and name of the model.
    engine, device : str
    files : dict of str to str
        Path in the folder to SHA-256.
    entry, command : str
        The file to begin with, and how it is run, from inside of the folder.
    keys : tuple of KeyOutcome
        What becomes of each key of the policy.
    notes : tuple of str
        What else differs from a session.
    proof : VerificationResult or None
        What a run without xpuruntime showed, where one was asked for.
    """

    STATED: ClassVar = ("exit_code",)

    schema: str = SCHEMA
    target: str
    folder: str
    lock: str
    model: str
    engine: str
    device: str
    files: dict[str, str] = msgspec.field(default_factory=dict)
    entry: str
    command: str
    keys: tuple[KeyOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    proof: VerificationResult | None = None

    @property
    def not_kept(self) -> tuple[KeyOutcome, ...]:
        """The keys that are weakened or lost."""
        return tuple(key for key in self.keys if key.outcome != "kept")

    @property
    def exit_code(self) -> int:
        """The exit code of ``xrt export``: that of the proof, as ``xrt verify`` has it; 0 without one."""
        return 0 if self.proof is None else self.proof.exit_code

    def __rich__(self) -> RenderableType:

        return render(self)


_STYLE = {"kept": "green", "weakened": "yellow", "lost": "bold red"}


def render(result: ExportResult) -> RenderableType:
    """Return where it was written, how it is run, a table of the keys, the notes and the proof."""
    from rich.console import Group
    from rich.text import Text

    counts: Counter[str] = Counter(key.outcome for key in result.keys)
    summary = ", ".join(f"{counts[word]} {word}" for word in _STYLE if counts[word]) or "no key is stated"
    parts: list[RenderableType] = [
        Text(f"{result.folder}: {result.model} on {result.engine}@{result.device} as {result.target}"),
        Text(f"policy keys: {summary}"),
    ]
    rows = [
        (key.key, key.requested, key.enforceability, (key.outcome, _STYLE[key.outcome]), key.reason)
        for key in result.keys
    ]
    columns = ("key", "requested", "in xpuruntime", "here", "why")
    parts += rows_table("keys", columns, rows, most=None)
    parts += [Text(f"note: {note}") for note in result.notes]
    parts.append(Text(f"run it: cd {shlex.quote(result.folder)} && {result.command}"))
    if result.proof is not None:
        parts += [Text(""), result.proof]
    return Group(*parts)


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


def _claim(
    id: str, expected: str | None, observed: str | None, verdict: str, reason: str, *, section: str = "evidence"
) -> Claim:
    codes = {"pass": ClaimCode.OK, "fail": ClaimCode.LOCK_DIFFERS, "unobservable": ClaimCode.UNOBSERVABLE}
    return Claim(
        id=id,
        section=section,  # type: ignore[arg-type]
        requested=shown(expected),
        observed=shown(observed),
        verdict=verdict,  # type: ignore[arg-type]
        code=codes[verdict],
        reason=reason,
        fix=_FIX if verdict == "fail" else None,
    )


def _surroundings(exporter: NativeExporter, ran: NativeRun) -> Iterator[Claim]:
    expected, version = exporter.job.version, ran.facts.get("version", "")
    same = expected == version
    yield _claim("evidence.engine", expected, version, "pass" if same else "fail", "version of the engine")
    wanted = exporter.device_word()
    there = ran.facts.get("device", "")
    yield _claim("evidence.device", wanted, there, "pass" if there == wanted else "fail", "as the engine names it")


def _outputs(lock: Lock, at: LockedShapes, ran: NativeRun, model: ModelInfo) -> Iterator[Claim]:
    locked = tuple(output for output in lock.identity.outputs if output.at == at.id)
    drifts = {result.subject: result for result in compare_results(locked, lock, ran.outputs, at.id, model)}
    for output in locked:
        id = f"accuracy.outputs.{output.name}"
        drift = drifts.pop(output.name, None)
        if drift is not None:
            yield _claim(id, drift.before, drift.after, "fail", f"{output.grade} for probe inputs", section="accuracy")
        elif output.grade == "random":
            reason = f"random numbers of node {model.random_outputs[output.name]} are in it"
            yield _claim(id, "-", "-", "unobservable", reason, section="accuracy")
        else:
            how = (
                "the same bits"
                if output.grade == "bitwise"
                else f"within rtol {output.rtol:g} and atol {output.atol:g}"
            )
            yield _claim(id, output.grade, how, "pass", "of the probe inputs of the lock", section="accuracy")
    for name, drift in drifts.items():
        yield _claim(
            f"accuracy.outputs.{name}",
            drift.before,
            drift.after,
            "fail",
            "not in the lock",
            section="accuracy",
        )
    if not locked:
        reason = "the lock has no outputs: its model takes inputs that cannot be generated"
        yield _claim("accuracy.outputs", "-", "-", "unobservable", reason, section="accuracy")


def _units(identity: Identity, at: LockedShapes, ran: NativeRun) -> Iterator[Claim]:
    entries = [entry for entry in identity.entries if entry.at == at.id]
    if ran.observed is None or not ran.observed.units:
        reason = "the engine did not report what it ran"
        yield _claim("evidence.units", f"{len(entries)} units", "-", "unobservable", reason)
        return
    groups: dict[str, list[Difference]] = {}
    for drift in compare_observed(identity, ran.observed.units, ran.observed.decisions, at=at.id):
        groups.setdefault(drift.subject, []).append(drift)
    blind = 0
    for entry in entries:
        group = groups.pop(entry.unit, [])
        hidden = [drift for drift in group if drift.code == DriftCode.UNOBSERVABLE]
        real = [drift for drift in group if drift.code != DriftCode.UNOBSERVABLE]
        blind += entry.known == "unobservable"
        stated = " ".join(part for part in (entry.on, entry.kernel, entry.precision, entry.layout) if part)
        id = f"evidence.units.{entry.unit}"
        if real:
            text = "; ".join(f"{drift.code}: {drift.before}, found {drift.after}" for drift in real)
            yield _claim(id, stated, real[0].after, "fail", text)
        elif hidden:
            yield _claim(id, stated, hidden[0].after, "unobservable", "its kernel is not reported here")
        else:
            yield _claim(
                id, stated, "the same", "pass", "placement, precision, layout, fusion and kernel, where reported"
            )
    for subject, group in groups.items():
        text = "; ".join(f"{drift.code}: {drift.before}, found {drift.after}" for drift in group)
        yield _claim(f"evidence.units.{subject}", group[0].before, group[0].after, "fail", text)
    if blind:
        reason = f"the engine reports no kernel of {blind} units, in the lock neither"
        yield _claim("evidence.kernels", f"{blind} units", "-", "unobservable", reason)
