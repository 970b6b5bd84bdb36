# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LockInForce`: a lock that a session is opened under, whose validators are compared before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.artifacts.manifest import Artifact, digest_of_files
from xpuruntime.engines.model.external import part_digests
from xpuruntime.engines.model.shapes import shape_fits
from xpuruntime.errors import InputError, LockError, OutOfMemoryError, PolicyError, XpuRuntimeError
from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.records import Control, KeySeen, Unit
from xpuruntime.evidence.tolerances import samples_agree
from xpuruntime.files.paths import json_bytes, with_home
from xpuruntime.lockfile.canonical import load_lock
from xpuruntime.lockfile.consistency import session_records
from xpuruntime.lockfile.differences import (
    compare_calls,
    compare_entries,
    compare_outputs,
    compare_plans,
    unseen,
)
from xpuruntime.lockfile.drift import DriftCode, drift_error, shown
from xpuruntime.lockfile.entries import call_entries, unit_entries
from xpuruntime.lockfile.measured import OutputSample
from xpuruntime.lockfile.records import SHAPES_ID, Identity, Lock, LockedModel, LockedOutput, LockedPlan, LockedShapes
from xpuruntime.lockfile.rules import PLACES, locked_policy, policy_of, stated_keys
from xpuruntime.lockfile.validators import Surroundings, compare_libraries, compare_validators
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    import os

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantization import Calibration
    from xpuruntime.evidence.kernel_records import KernelDecision
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.planning import Plan
    from xpuruntime.runtime.machine import Machine

#: Of a lock of a model whose inputs cannot be generated.
_NO_OUTPUTS = "; no outputs are, since the lock has none"
#: Differences that a reason names.
_NAMED = 4


class LockInForce(NamedTuple):
    """A lock that a session is opened under, where it is from, the policy that it runs under, and its calibration."""

    lock: Lock
    where: str
    policy: Policy
    calibration: Calibration | None = None

    def checked(self, plan: Plan) -> Plan:
        """Return the plan with the control of the lock."""
        locked = self.lock.identity.plan
        assert locked is not None
        drifts = compare_plans(locked, locked_plan(plan))
        if drifts:
            raise drift_error(self.where, drifts)
        identity = self.lock.identity
        control = Control(
            key="execution.lock",
            requested=self.where,
            resolved=self.lock.digest,
            enforceability="enforced",
            reason="validators are compared before anything is loaded"
            + (", outputs of probe inputs after it" if identity.outputs else _NO_OUTPUTS)
            + _random(identity),
        )
        return msgspec.structs.replace(plan, policy_source="lock", controls=(*plan.controls, control))


class SessionLock(NamedTuple):
    """A lock of a session that was read, where it is from, its plan, and its own policy."""

    lock: Lock
    where: str
    plan: LockedPlan
    policy: Policy


def read_session_lock(path: str | os.PathLike[str]) -> SessionLock:
    """Read the lock that a session is to open under."""
    source = with_home(str(path), "the lock")
    lock, where = load_lock(source), str(source)
    records = session_records(lock.identity)
    if records is None:
        raise LockError(
            f"{where} is a lock of {lock.identity.subject}, and a session needs one of inference. Fix: make one with "
            "`xrt lock MODEL`"
        )
    _, locked, plan = records
    return SessionLock(lock, where, plan, policy_of(locked, source))


def lock_in_force(
    read: SessionLock,
    policy: Policy,
    info: ModelInfo,
    machine_of: Callable[[tuple[str, ...]], Machine],
    calibration: Calibration | None,
    artifact: Artifact | None,
) -> LockInForce:
    """Return the lock that a session opens under, once all of its validators hold for `policy`, the settled one."""
    identity, plan = read.lock.identity, read.plan
    here = surroundings(
        plan.engine,
        plan.device,
        machine_of((plan.engine,)),
        info,
        calibration=calibration,
        artifact=artifact,
        policy=stated_keys(policy),
        like=identity.model,
    )
    drifts = compare_validators(identity, here)
    if drifts:
        raise drift_error(read.where, drifts, model=info.path)
    return LockInForce(
        read.lock, read.where, locked_policy(read.policy, plan.engine, plan.device, identity.calls), calibration
    )


def surroundings(
    engine: str,
    device: str,
    machine: Machine,
    info: ModelInfo,
    *,
    calibration: Any = None,
    artifact: Artifact | None = None,
    policy: Mapping[str, str] | None = None,
    like: LockedModel | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Surroundings:
    """Return what validators are compared with, for a session of a model.

    Parameters
    ----------
    engine, device : str
    machine : Machine
    info : ModelInfo
    calibration : Calibration, optional
    artifact : Artifact, optional
    policy : mapping of str to str, optional
        The keys of the policy that is stated; default: the lock's own policy holds.
    like : LockedModel or None
        What a lock has of the model: where the file is the same, its parts need not be digested again.
    settings : mapping of str to object, optional
        Of the plan, where validators are collected.
    """
    return Surroundings(
        engine=engine,
        device=device,
        machine=machine,
        model=_locked_model(info, like),
        policy=policy,
        calibration=None if calibration is None else _calibration_facts(calibration),
        artifact=None if artifact is None else digest_of_files(artifact),
        settings=settings or {},
    )


def _calibration_facts(calibration: Calibration) -> dict[str, Any]:
    return {"samples": calibration.count, "ordered": calibration.digest, "content": calibration.content}


def _locked_model(info: ModelInfo, like: LockedModel | None) -> LockedModel:
    """Return what a lock has of a model; see `surroundings`. Raises `ModelError` where a file is gone."""
    from xpuruntime.engines.model.external import external_digests

    sha256, external = info.sha256, external_digests(info)
    if like is not None and like.sha256 == sha256:
        graph, initializers = like.graph_sha256, like.initializers_sha256
    else:
        graph, initializers = part_digests(info)
    return LockedModel(
        name=like.name if like is not None else info.graph_file or Path(info.path).name,
        format=info.format,
        sha256=sha256,
        graph_sha256=graph,
        initializers_sha256=initializers,
        external=external,
    )


def locked_plan(plan: Plan) -> LockedPlan:
    """Return what a lock has of a plan: no verdicts, no prose, and not the lock itself."""
    settings = msgspec.json.decode(json_bytes(plan.settings, enc_hook=str, order="deterministic"))
    return LockedPlan(
        engine=plan.engine,
        device=plan.device,
        precision=plan.precision,
        settings=settings,
        controls=tuple(sorted((c.key, c.resolved, c.enforceability) for c in plan.controls if c.key not in PLACES)),
    )


def check_loaded(in_force: LockInForce) -> None:
    """Compare the libraries that are mapped now with those of the lock."""
    drifts = compare_libraries(in_force.lock.identity)
    if drifts:
        raise drift_error(in_force.where, drifts)


def compare_observed(
    identity: Identity, units: Sequence[Unit], decisions: Sequence[KernelDecision], *, at: str = SHAPES_ID
) -> tuple[Difference, ...]:
    """Return what differs between the entries of a lock and the units of an instrumented run."""
    entries = unit_entries(units, decisions, identity.validators, at)
    calls = call_entries(decisions, identity.validators)
    locked = tuple(entry for entry in identity.entries if entry.at == at)
    return (*compare_entries(locked, entries), *compare_calls(identity.calls, calls))


def lock_seen(in_force: LockInForce, units: Sequence[Unit], decisions: Sequence[KernelDecision]) -> KeySeen:
    """Return what was observed of ``execution.lock`` in an instrumented run."""
    identity = in_force.lock.identity
    drifts = compare_observed(identity, units, decisions)
    if drifts:
        tail = f"; and {len(drifts) - _NAMED} more" if len(drifts) > _NAMED else ""
        reason = "; ".join(str(drift) for drift in drifts[:_NAMED]) + tail
        return KeySeen(observed=f"{len(drifts)} differences", status="substituted", reason=reason)
    blind = identity.unobservable
    reason = f"{len(identity.entries)} units ran as locked"
    if not identity.outputs:
        reason += "; no outputs were compared, since the lock has none"
    reason += _random(identity)
    if blind:
        reason += f"; {blind} of them with kernels that the engine does not report: only validators stand for these"
    return KeySeen(observed=in_force.lock.digest, status="honoured", reason=reason)


def _random(identity: Identity) -> str:
    names = identity.random_outputs
    return f"; {names} depend on random numbers, and are not compared" if names else ""


_PROBE = "probe:0"
#: Values of an output that are kept to compare within a tolerance.
_SAMPLES = 64


def probe_at(info: ModelInfo, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return probe inputs of a model in given shapes. Raises `InputError` where none can be made."""
    from xpuruntime.engines.cuda_arrays import host_copies
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.precision import probe_feeds

    known = {tensor.name for tensor in info.inputs}
    sizes = {name: tuple(shape) for name, shape in shapes.items() if shape and name in known}
    if sizes:
        info = with_shapes(info, Policy.coerce({"execution": {"shapes": {k: list(v) for k, v in sizes.items()}}}))
    return host_copies(probe_feeds(info))  # examples of a module may lie on a device


def shapes_that_fit(info: ModelInfo, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a lock where a model still has such inputs; nothing where it has others."""
    known = {tensor.name: tensor.shape for tensor in (*info.inputs, *info.overridable_inputs)}
    for name, sizes in shapes.items():
        dims = known.get(name, ())
        if name not in known or (dims is not None and not shape_fits(sizes, dims)):
            return {}
    return {name: tuple(sizes) for name, sizes in shapes.items()}


def observed_outputs(
    runs: Sequence[Mapping[str, Any]],
    *,
    rtol: float,
    atol: float,
    at: str = SHAPES_ID,
    random: Collection[str] = (),
) -> tuple[tuple[LockedOutput, ...], tuple[OutputSample, ...]]:
    """Return what a lock has of the outputs of several runs on the same inputs.

    Where their bits differ, an output is compared within a tolerance, with samples of its values; those that depend on
    random numbers are not compared.
    """
    outputs, samples = [], []
    for name in sorted(runs[0]):
        bits = {_digest(run[name]) for run in runs}
        first = _array(runs[0][name])
        if name in random:
            outputs.append(
                LockedOutput(input=_PROBE, at=at, name=name, dtype=str(first.dtype), shape=(), grade="random")
            )
            continue
        shape = tuple(int(size) for size in first.shape)
        bitwise = len(bits) == 1
        outputs.append(
            LockedOutput(
                input=_PROBE,
                at=at,
                name=name,
                dtype=str(first.dtype),
                shape=shape,
                grade="bitwise" if bitwise else "tolerance",
                sha256=bits.pop() if bitwise else "",
                rtol=0.0 if bitwise else rtol,
                atol=0.0 if bitwise else atol,
            )
        )
        if not bitwise:
            samples.append(OutputSample(name=name, at=at, values=_samples(first)))
    return tuple(outputs), tuple(samples)


def _array(value: Any) -> Any:
    import numpy as np

    return np.asarray(value)


def _digest(value: Any) -> str:
    import numpy as np

    array = np.ascontiguousarray(_array(value))
    data = json.dumps(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return hashlib.sha256(data).hexdigest()


def _samples(array: Any) -> tuple[float, ...]:
    import numpy as np

    flat = np.ravel(array)
    places = np.unique(np.linspace(0, max(len(flat) - 1, 0), min(_SAMPLES, len(flat))).astype(np.int64))
    return tuple(float(value) for value in np.asarray(flat[places], np.float64))


def check_outputs(session: InferenceSession, in_force: LockInForce) -> None:
    """Run probe inputs and compare their outputs with those of a lock.

    A lock has none where no probe inputs can be made or the model refuses them, and only there.
    """
    from xpuruntime.engines.precision import probing

    lock, where = in_force.lock, in_force.where
    for shapes in lock.identity.shapes:
        locked = tuple(output for output in lock.identity.outputs if output.at == shapes.id)
        try:
            feeds = probe_at(session.model, shapes.inputs)
            with probing(session.model, feeds):
                results = session.run(feeds)
        except (InputError, PolicyError, OutOfMemoryError) as error:
            if not locked and isinstance(error, InputError):
                continue
            raise drift_error(where, [_shapes_drift(shapes, error)]) from error
        drifts = compare_results(locked, lock, results, shapes.id, session.model)
        if drifts:
            raise drift_error(where, drifts, model=session.model.path)


def _shapes_drift(shapes: LockedShapes, error: XpuRuntimeError) -> Difference:
    return Difference(
        code=DriftCode.SHAPES,
        subject=shapes.id,
        before=shown({name: list(sizes) for name, sizes in shapes.inputs.items()}),
        after=f"a model that does not run with them: {error.reason}",
        restore="restore the file of the lock, or make it again with `xrt lock MODEL --upgrade --shapes`",
    )


def compare_results(
    locked: tuple[LockedOutput, ...], lock: Lock, results: Mapping[str, Any], at: str, model: ModelInfo
) -> tuple[Difference, ...]:
    """Return what differs between the outputs of a lock and those of one run on its probe inputs."""
    observed, _ = observed_outputs([results], rtol=0, atol=0, at=at, random=model.random_outputs)
    now = {output.name: output for output in observed}
    samples = {sample.name: sample.values for sample in lock.measured.samples if sample.at == at}
    for expected in locked:
        other = now.get(expected.name)
        near = (
            expected.grade == "tolerance"
            and other is not None
            and (expected.dtype, expected.shape) == (other.dtype, other.shape)
            and samples_agree(
                samples.get(expected.name, ()), _samples(_array(results[expected.name])), expected.rtol, expected.atol
            )
        )
        if near:
            now[expected.name] = expected
    return compare_outputs(locked, tuple(now.values()), unseen(lock.identity))
