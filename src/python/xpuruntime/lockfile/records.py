# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The record types of a lock: what must be the same, what was measured, and where the lock comes from."""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from xpuruntime.lockfile.drift import DriftCode, ValidatorKind
from xpuruntime.lockfile.measured import Measured
from xpuruntime.printable import printable

SCHEMA = "xpuruntime.lock/1"
#: Id of the shapes that a lock is made with.
SHAPES_ID = "s0"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen, keyword-only value; a file with a key that it lacks is refused."""


class Validator(_Record, frozen=True, kw_only=True):
    """One fact of the surroundings that entries depend on.

    Attributes
    ----------
    id : str
        Short, unique in the lock, and a function of `kind` and `key`.
    kind : ValidatorKind
    key : str
        Which one, such as ``"libonnxruntime.so.1"`` or ``"cuda:0"``.
    expect : object
        The value that was found when the lock was made: text, a list or a mapping.
    """

    id: str
    kind: ValidatorKind
    key: str
    expect: Any


class UnitEntry(_Record, frozen=True, kw_only=True):
    """One unit that an engine executed.

    Attributes
    ----------
    unit : str
        The engine's own name of the unit, where that is the same in every load; else its operator and what it makes.
    op : str
        The engine's operator type.
    relation : str
        As `xpuruntime.evidence.records.Unit.relation`.
    sources : tuple of str
        Source nodes that it stands for.
    outputs : tuple of str
        Source tensors that it makes.
    at : str
        `LockedShapes.id` of the inputs that it was observed with.
    on : str
        Engine, device and provider: ``"onnxruntime cpu CPUExecutionProvider"``.
    kernel : str or None
        ``"id@configuration"``; ``None`` where no kernel was reported.
    precision : str or None
        Of the tensors that it reads and writes.
    accumulate : str or None
        Precision of sums inside of it, where that is known.
    layout : str or None
    depends_on : tuple of str
        `Validator.id` of all that it depends on; in a file also one key of `Identity.groups`, in place of its ids.
    known : {"observed", "unobservable"}
        ``"unobservable"``: the engine does not report which kernel ran, so that only the validators stand for it.
    """

    unit: str
    op: str
    relation: str
    sources: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    at: str
    on: str
    kernel: str | None = None
    precision: str | None = None
    accumulate: str | None = None
    layout: str | None = None
    depends_on: tuple[str, ...] = ()
    known: Literal["observed", "unobservable"]


class CallEntry(_Record, frozen=True, kw_only=True):
    """The kernel of one operation that xpuruntime dispatched, in a training step or before an export.

    Attributes
    ----------
    op, dtype : str
        Such as ``"matmul"`` and ``"bf16"``.
    facts : dict of str to int or str
        Sizes that decide, such as ``m``, ``n``, ``k`` or ``head_dim``; a text is a range, such as ``"33..64"``.
    phase : str
        ``"forward"``, ``"backward"``, or empty where no rule depends on it.
    module, node : str
        Path of the module, and name of the graph's node, that called; empty where it is not known, or no rule depends
        on it.
    kernel : str
        ``"id@configuration"``, as a rule of a policy takes it.
    count : int
        Of earlier releases, calls in one step: it tells nothing of what computes, and is 0 since.
    depends_on : tuple of str
    known : {"observed", "unobservable"}
    """

    op: str
    dtype: str
    facts: dict[str, int | str] = {}
    phase: str = ""
    module: str = ""
    node: str = ""
    kernel: str
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    depends_on: tuple[str, ...] = ()
    known: Literal["observed", "unobservable"] = "observed"

    @property
    def name(self) -> str:
        """The call in a few words: operation, type, sizes, phase and who called."""
        sizes = " ".join(f"{name}={size}" for name, size in sorted(self.facts.items()))
        return " ".join(part for part in (self.op, self.dtype, sizes, self.phase, self.module, self.node) if part)


class LockedModel(_Record, frozen=True, kw_only=True):
    """What the model was.

    Attributes
    ----------
    name : str
        Of its file, without the folder.
    format : str
        ``"onnx"`` or ``"pt2"``.
    sha256 : str
        Of the whole file.
    graph_sha256, initializers_sha256 : str
        Of the graph without the values of its initializers, and of these; empty where they were not read.
    external : dict of str to str
        File of external data to its SHA-256.
    """

    name: str
    format: str
    sha256: str
    graph_sha256: str = ""
    initializers_sha256: str = ""
    external: dict[str, str] = {}


class LockedPolicy(_Record, frozen=True, kw_only=True):
    """The policy: its digest, every stated key as text, and the document that it is read back from."""

    sha256: str
    stated: dict[str, str] = {}
    document: dict[str, Any] = {}


class LockedPlan(_Record, frozen=True, kw_only=True):
    """What was resolved.

    Attributes
    ----------
    engine, device, precision : str
    settings : dict
        What the engine is given.
    controls : tuple of (str, str, str)
        Policy key, what it becomes, enforceability.
    """

    engine: str
    device: str
    precision: str
    settings: dict[str, Any] = {}
    controls: tuple[tuple[str, str, str], ...] = ()


class LockedShapes(_Record, frozen=True, kw_only=True):
    """Input shapes that entries and outputs were observed with."""

    id: str
    inputs: dict[str, tuple[int, ...]]


class LockedOutput(_Record, frozen=True, kw_only=True):
    """What one output is for a probe input.

    Attributes
    ----------
    input : str
        ``"probe:0"``: the inputs that are made from the model's shapes with this seed.
    at : str
        `LockedShapes.id`.
    name, dtype : str
    shape : tuple of int
    grade : {"bitwise", "tolerance", "random"}
        ``"bitwise"`` where runs of two sessions gave the same bits; else the values are compared within `rtol` and
        `atol` with samples that are kept beside the identity. ``"random"``: it depends on random numbers, and of its
        values and its shape nothing is locked.
    sha256 : str
        Of the bytes; empty unless `grade` is ``"bitwise"``.
    rtol, atol : float
    """

    input: str
    at: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    grade: Literal["bitwise", "tolerance", "random"]
    sha256: str = ""
    rtol: float = 0.0
    atol: float = 0.0


class Identity(_Record, frozen=True, kw_only=True):
    """What must be the same. Locking twice gives equal identities.

    Attributes
    ----------
    subject : {"inference", "training", "export"}
        What is locked: a session, the kernels of training steps, or what a model was exported from.
    model : LockedModel or None
    policy : LockedPolicy or None
    plan : LockedPlan or None
    validators : tuple of Validator
    shapes : tuple of LockedShapes
    entries : tuple of UnitEntry
    calls : tuple of CallEntry
    outputs : tuple of LockedOutput
    groups : dict of str to tuple of str
        Only in a file, where several entries depend on the same validators: name to their ids. The digest is that of
        the identity with the ids in the entries, as files of earlier releases have them.
    """

    subject: Literal["inference", "training", "export"]
    model: LockedModel | None = None
    policy: LockedPolicy | None = None
    plan: LockedPlan | None = None
    validators: tuple[Validator, ...] = ()
    shapes: tuple[LockedShapes, ...] = ()
    entries: tuple[UnitEntry, ...] = ()
    calls: tuple[CallEntry, ...] = ()
    outputs: tuple[LockedOutput, ...] = ()
    groups: dict[str, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET

    @property
    def random_outputs(self) -> str:
        """The outputs that depend on random numbers, so that nothing of their values is locked."""
        return ", ".join(dict.fromkeys(repr(output.name) for output in self.outputs if output.grade == "random"))

    @property
    def counts(self) -> str:
        """The numbers of units, calls and outputs; of the units that the engine inserted, how many they are."""
        inserted = sum(entry.relation == "inserted" for entry in self.entries)
        parts = [(len(self.entries), "unit"), (len(self.calls), "call"), (len(self.outputs), "output")]
        told = [f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in parts if number]
        if inserted:
            told[0] += f" ({inserted} inserted by the engine)"
        return ", ".join(told) or "nothing observed"

    @property
    def unobservable(self) -> int:
        """The number of units whose kernel the engine does not report."""
        return sum(entry.known == "unobservable" for entry in self.entries)

    @property
    def compiled(self) -> bool:
        """Whether code of the model was compiled."""
        return any(validator.kind == ValidatorKind.COMPILER for validator in self.validators)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of xpuruntime and of plugins that ran."""
        return tuple(call.kernel for call in self.calls)

    def grouped(self) -> Identity:
        """Return the identity as a file has it: lists of validators that several entries repeat are groups."""
        counts = Counter([entry.depends_on for entry in self.entries] + [call.depends_on for call in self.calls])
        repeated = [ids for ids, count in counts.items() if count > 1 and len(ids) > 1]
        names = {ids: f"g{index}" for index, ids in enumerate(repeated)}
        if not names:
            return self
        groups = {name: ids for ids, name in names.items()}
        return self._depending(lambda ids: (names[ids],) if ids in names else ids, groups)

    def ungrouped(self) -> Identity:
        """Return the identity with the ids of validators in its entries."""
        if self.groups is msgspec.UNSET:
            return self
        groups = self.groups
        return self._depending(lambda ids: groups.get(ids[0], ids) if len(ids) == 1 else ids, msgspec.UNSET)

    def _depending(self, ids_of: Callable[[tuple[str, ...]], tuple[str, ...]], groups: Any) -> Identity:
        changed = msgspec.structs.replace
        return changed(
            self,
            entries=tuple(changed(entry, depends_on=ids_of(entry.depends_on)) for entry in self.entries),
            calls=tuple(changed(call, depends_on=ids_of(call.depends_on)) for call in self.calls),
            groups=groups,
        )

    def dependents(self) -> dict[str, tuple[str, ...]]:
        """Return id of a validator to the names of the units and calls that depend on it."""
        by_id: dict[str, dict[str, None]] = {}
        names = [(entry.unit, entry.depends_on) for entry in self.entries] + [
            (call.name, call.depends_on) for call in self.calls
        ]
        for name, ids in names:
            for id in ids:
                by_id.setdefault(id, {})[name] = None
        return {id: tuple(entries) for id, entries in by_id.items()}


class AcceptedDrift(_Record, frozen=True, kw_only=True):
    """A difference that a user accepted: its code, what it was of, from and to, and why."""

    code: DriftCode
    subject: str
    expected: str
    found: str
    why: str
    at: str = ""


class Provenance(_Record, frozen=True, kw_only=True):
    """Where the lock comes from; no part of the identity.

    Attributes
    ----------
    created : str
        UTC, ISO 8601.
    command, version : str
        What made it, and the version of this package.
    note : str
    accepted : tuple of AcceptedDrift
    dependencies : dict of str to str
        Lock files of packages that lay beside it, such as ``uv.lock``, with their SHA-256.
    facts : dict of str to str
        Such as the exporter and the opset of an exported model.
    """

    created: str = ""
    command: str = ""
    version: str = ""
    note: str = ""
    accepted: tuple[AcceptedDrift, ...] = ()
    dependencies: dict[str, str] = {}
    facts: dict[str, str] = {}

    @classmethod
    def now(cls, command: str, *, note: str = "", dependencies: dict[str, str] | None = None) -> Provenance:
        """Return the provenance of a lock that this version makes now."""
        from xpuruntime import __version__

        return cls(created=utc_now(), command=command, version=__version__, note=note, dependencies=dependencies or {})


class Lock(_Record, frozen=True, kw_only=True):
    """A lock: a plan with what was observed, and all that both depend on.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.lock/1"``.
    digest : str
        ``"sha256:…"`` of the identity: the name of the lock. A file whose identity has another digest was edited.
    identity : Identity
    measured : Measured
    measured_digest : str
        ``"sha256:…"`` of the measurements, which a lock of an earlier release does not have: `sealed` is then false.
    provenance : Provenance
    """

    schema: str = SCHEMA
    digest: str
    identity: Identity
    measured: Measured = Measured()
    measured_digest: str | msgspec.UnsetType = msgspec.UNSET
    provenance: Provenance = Provenance()

    @classmethod
    def of(cls, identity: Identity, *, measured: Measured | None = None, provenance: Provenance | None = None) -> Lock:
        """Return a lock of an identity, with its digest and that of the measurements."""
        measured = measured or Measured()
        return cls(
            digest=digest_of_part(identity),
            identity=identity,
            measured=measured,
            measured_digest=digest_of_part(measured),
            provenance=provenance or Provenance(),
        )

    def __repr__(self) -> str:
        identity = self.identity
        of = identity.model.name if identity.model is not None else identity.subject
        where = f" on {identity.plan.engine}@{identity.plan.device}" if identity.plan is not None else ""
        return printable(f"<Lock of {of}{where}: {identity.counts}, {self.digest[:19]}>")

    @property
    def sealed(self) -> bool:
        """Whether an edit of the measurements would be detected."""
        return self.measured_digest is not msgspec.UNSET

    def filed(self) -> Lock:
        """Return the lock as a file has it; `parse_lock` undoes it."""
        return msgspec.structs.replace(self, identity=self.identity.grouped())


def utc_now() -> str:
    """Return the time in UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def digest_of_part(part: Identity | Measured) -> str:
    """Return ``"sha256:…"`` of a lock's part, as canonical JSON."""
    return "sha256:" + hashlib.sha256(msgspec.json.encode(part, order="sorted")).hexdigest()


def stable_id(kind: str, key: str) -> str:
    """Return the id of a validator: the same for the same kind and key in every lock."""
    return f"{kind[:3]}-{hashlib.sha256(f'{kind}:{key}'.encode()).hexdigest()[:8]}"
