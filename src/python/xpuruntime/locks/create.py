# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`create_lock`: plan, instrumented run and probe outputs of a model under a policy, as a lock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.precision import probing
from xpuruntime.errors import InputError, LockError
from xpuruntime.evidence.tolerances import REPEATED
from xpuruntime.files.digests import file_digest
from xpuruntime.inference import InferenceSession
from xpuruntime.inference.calls import open_calls
from xpuruntime.inference.locked import locked_plan, observed_outputs, probe_at, shapes_that_fit, surroundings
from xpuruntime.lockfile.entries import call_entries, unit_entries
from xpuruntime.lockfile.measured import LatencyFigures, Measured, OutputSample
from xpuruntime.lockfile.records import SHAPES_ID, Identity, Lock, LockedShapes, Provenance
from xpuruntime.lockfile.rules import locked_policy, policy_record, stated_keys, without_lock
from xpuruntime.lockfile.validators import collect_validators
from xpuruntime.locks.figures import check_batches, measure_ratios, memory_of_session, peak_of_process, times_of_batches
from xpuruntime.measuring.conditions import between, moment
from xpuruntime.measuring.rounds import rounds_of
from xpuruntime.policies import Policy
from xpuruntime.runtime.telemetry import log_step, traced

if TYPE_CHECKING:
    from xpuruntime.evidence.records import Observation
    from xpuruntime.lockfile.records import CallEntry, LockedOutput

#: Lock files of packages, which are digested where they lie beside the model or in the current folder.
_DEPENDENCIES = ("uv.lock", "pylock.toml", "conda-lock.yml", "poetry.lock", "requirements.txt")
_TIMES, _ROUNDS, _CALLS = 3, 9, 5


def _facts_of(made: tuple[Lock, tuple[Observation, ...]]) -> dict[str, Any]:
    return {"digest": made[0].digest}


@traced("lock", _facts_of)
def create_lock(
    model: Any,
    policy: Any = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    before: Mapping[str, Sequence[int]] | None = None,
    pins: Sequence[CallEntry] = (),
    command: str = "",
    measure: bool = True,
    batches: Sequence[int] = (),
    call: str = "run",
    folder: str = "",
    **options: Any,
) -> tuple[Lock, tuple[Observation, ...]]:
    """Return the lock of a model under a policy, and the keys of the policy that were not honoured in its run."""
    options.pop("lock", None)
    batches = check_batches(batches)
    stated = None if policy is None else without_lock(Policy.coerce(policy))
    steps = 3 if measure else 2
    log_step("observing", 1, steps)
    with InferenceSession(model, policy=stated, **options) as first:
        source = first.policy
        feeds = _feeds(first, shapes, inputs, before)
        at = LockedShapes(id=SHAPES_ID, inputs={name: _shape(array) for name, array in sorted(feeds.items())})
        with probing(first.model, feeds, generated=inputs is None):
            observed = first.explain(feeds, runs=1)
        calls = _preferred(call_entries(observed.decisions, ()), pins)
        probes = _probes(first, at)
        runs = [first.run(probes) for _ in range(_TIMES)] if probes is not None else []
        engine, device, machine = first.plan.engine, first.plan.device, first._machine
    pinned = locked_policy(source, engine, device, calls)
    again = {name: options[name] for name in ("calibration", "trust", "registry", "machine") if name in options}
    log_step("running as locked", 2, steps)
    with InferenceSession(model, policy=pinned, **again) as session:
        report = session.explain(feeds, runs=1)
        _check_same_kernels(calls, call_entries(report.decisions, ()))
        if probes is not None:
            runs += [session.run(probes) for _ in range(_TIMES)]
        here = surroundings(
            engine,
            device,
            machine,
            session.model,
            calibration=session._request.calibration,
            artifact=session._request.artifact,
            policy=stated_keys(source),
            settings=session.plan.settings,
        )
        validators = collect_validators(here, kernels=[call.kernel for call in calls])
        outputs, samples = _outputs(runs, source, session.model.random_outputs)
        measured = Measured(samples=samples)
        if measure:
            log_step("measuring", 3, steps)
            measured = _measured(session, model, feeds, source, samples, {**options, "policy": stated}, call)
            if batches:
                measured = _with_batches(measured, session, model, at.inputs, batches, bool(options.get("trust")))
        identity = Identity(
            subject="inference",
            model=here.model,
            policy=policy_record(source, folder),
            plan=locked_plan(session.plan),
            validators=validators,
            shapes=(at,),
            entries=unit_entries(report.units, report.decisions, validators, SHAPES_ID),
            calls=call_entries(report.decisions, validators),
            outputs=outputs,
        )
    provenance = Provenance.now(command, dependencies=_dependencies(model))
    return Lock.of(identity, measured=measured, provenance=provenance), observed.deviations


def _preferred(calls: tuple[CallEntry, ...], pins: Sequence[CallEntry]) -> tuple[CallEntry, ...]:
    before = {(pin.op, pin.node): pin.kernel for pin in pins}
    return tuple(
        msgspec.structs.replace(call, kernel=before[call.op, call.node]) if (call.op, call.node) in before else call
        for call in calls
    )


def _feeds(
    session: InferenceSession,
    shapes: Mapping[str, Sequence[int]] | None,
    inputs: Mapping[str, Any] | None,
    before: Mapping[str, Sequence[int]] | None,
) -> dict[str, Any]:
    if shapes is None and inputs is None and before is not None:
        shapes = shapes_that_fit(session.model, before)
    if inputs is not None:
        if shapes:
            raise InputError("shapes are those of the inputs that are given. Fix: leave out shapes, or inputs")
        return dict(inputs)
    known = [tensor.name for tensor in session.inputs]
    for name in shapes or ():
        if name not in known:
            raise InputError(f"the model has no input {name!r}; its inputs are {', '.join(known) or 'none'}")
    return probe_at(session.model, shapes or {})


def _shape(array: Any) -> tuple[int, ...]:
    import numpy as np

    return tuple(int(size) for size in (array.shape if hasattr(array, "shape") else np.shape(array)))


def _probes(session: InferenceSession, at: LockedShapes) -> dict[str, Any] | None:
    try:
        probes = probe_at(session.model, at.inputs)
        with probing(session.model, probes):
            session.run(probes)
    except InputError:
        return None
    return probes


def _outputs(
    runs: Sequence[Mapping[str, Any]], policy: Policy, random: Mapping[str, str]
) -> tuple[tuple[LockedOutput, ...], tuple[OutputSample, ...]]:
    if not runs:
        return (), ()
    wanted = policy.accuracy
    rtol = REPEATED.rtol if wanted is None or wanted.rtol is None else wanted.rtol
    atol = REPEATED.atol if wanted is None or wanted.atol is None else wanted.atol
    return observed_outputs(runs, rtol=rtol, atol=atol, random=random)


def _check_same_kernels(first: Sequence[CallEntry], second: Sequence[CallEntry]) -> None:
    before = {(entry.op, entry.node): entry.kernel for entry in first}
    after = {(entry.op, entry.node): entry.kernel for entry in second}
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            raise LockError(
                f"cannot lock {' '.join(key)}: it ran {before.get(key)} under the policy, and {after.get(key)} where "
                "that was pinned. Fix: state the kernel of this node in kernels.rules"
            )


def _measured(
    session: InferenceSession,
    model: Any,
    feeds: dict[str, Any],
    policy: Policy,
    samples: tuple[OutputSample, ...],
    options: dict[str, Any],
    call: str,
) -> Measured:
    """Return the time of a run, and what the section ``verify`` of the policy is checked against later."""
    measured = Measured(latency_us=_latency(session, feeds, call), samples=samples)
    if policy.verify is None:
        return measured
    trust = bool(options.get("trust"))

    def reopen() -> InferenceSession:
        return InferenceSession(model, **options)

    return msgspec.structs.replace(
        measured,
        ratios=measure_ratios(session, model, feeds, policy.verify, reopen, trust=trust),
        memory_peak=peak_of_process(model, policy, feeds, trust=trust),
    )


def _with_batches(
    measured: Measured,
    session: InferenceSession,
    model: Any,
    shapes: Mapping[str, Sequence[int]],
    batches: Sequence[int],
    trust: bool,
) -> Measured:
    """Return what was measured with times by batch size, and the memory of a session with the largest."""
    return msgspec.structs.replace(
        measured,
        batches=times_of_batches(session, shapes, batches),
        memory=memory_of_session(session, model, session.policy, shapes, max(batches), trust=trust),
    )


def _latency(session: InferenceSession, feeds: dict[str, Any], call: str) -> LatencyFigures:
    before = moment()
    calls = open_calls(session, [feeds], call)
    try:
        rounds = rounds_of({"run": calls.prepared(0)}, calls=_CALLS, rounds=_ROUNDS, warm=_CALLS)["run"]
    finally:
        calls.close()
    micro = [1e6 * seconds for seconds in rounds]
    latency: LatencyFigures = {"p50": statistics.median(micro), "fastest": min(micro), "slowest": max(micro)}
    latency |= {"rounds": _ROUNDS, "calls": _CALLS}
    if call == "bind":
        latency["call"] = "bind"
    if remarks := between(before, moment()).remarks():
        latency["remarks"] = list(remarks)
    return latency


def _dependencies(model: Any) -> dict[str, str]:
    folders = [Path.cwd()]
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        folders.insert(0, Path(model).resolve().parent)
    dependencies: dict[str, str] = {}
    for folder in folders:
        for name in _DEPENDENCIES:
            try:
                dependencies.setdefault(name, file_digest(folder / name))
            except OSError:
                continue
    return dependencies
