# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`create_lock`: plan, instrumented run, probe outputs and measured figures of a model under a policy, as a lock."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.engines.precision import probing
from xpuruntime.errors import InputError, LockError, XpuRuntimeError
from xpuruntime.evidence.tolerances import REPEATED
from xpuruntime.files.digests import file_digest
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.inference import InferenceSession
from xpuruntime.inference.calls import host_runner, open_calls, time_batches
from xpuruntime.inference.locked import locked_plan, observed_outputs, probe_at, shapes_that_fit, surroundings
from xpuruntime.lockfile.entries import call_entries, unit_entries
from xpuruntime.lockfile.measured import BatchTime, LatencyFigures, LockedRatio, Measured, OutputSample, SessionMemory
from xpuruntime.lockfile.records import SHAPES_ID, CallEntry, Identity, Lock, LockedOutput, LockedShapes, Provenance
from xpuruntime.lockfile.rules import locked_policy, policy_record, stated_keys, without_lock
from xpuruntime.lockfile.validators import collect_validators
from xpuruntime.locks.environments import MODULE, session_worker
from xpuruntime.locks.verification.speed import SMALLEST, ControlError, open_control, open_reference, time_metric
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.conditions import between, moment
from xpuruntime.measuring.rounds import RoundTimes, measure, rounds_of, timed
from xpuruntime.measuring.statistics import Margin, RatioComparison, RatioVerdict
from xpuruntime.policies import Policy
from xpuruntime.runtime.telemetry import log_step, traced
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.evidence.records import Observation
    from xpuruntime.policies import VerifyPolicy
    from xpuruntime.policies.verify_policy import Control

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


#: Rounds of the ratio of opening a session that a lock keeps.
_START_ROUNDS = 11
#: Slowdown of a start that counts.
START_MARGIN = Margin(0.25, 5e-3)
#: Runs in which engines fill their arenas.
_RUNS = 20


def measure_ratios(
    session: InferenceSession,
    model: Any,
    feeds: dict[str, Any],
    verify: VerifyPolicy,
    reopen: Callable[[], InferenceSession],
    *,
    trust: bool,
) -> dict[str, LockedRatio]:
    """Time a session, and its opening, beside a control: what the section ``verify`` of a policy asks for.

    Where there is no control, or a metric takes longer than the budget, its ratio is left out.
    """
    ratios: dict[str, LockedRatio] = {}
    if verify.speed is not None:
        checks = verify.speed
        ends = time.monotonic() + checks.budget
        with ExitStack() as stack:
            try:
                control, _ = open_control(checks.control, session, model, feeds, stack, trust=trust)
            except ControlError:
                return ratios
            run = session.run
            for metric in checks.metric:
                left = ends - time.monotonic()
                timing = time_metric(metric, timed(lambda: run(feeds)), control, checks, left, keep=True)
                if timing.comparison is not None:
                    margin = Margin(checks.max_slowdown, SMALLEST).of(timing.figures["session_us"] / 1e6)
                    ratios[metric] = _ratio(timing.comparison, checks.control, margin=margin)
    if verify.start is not None:
        rounds = (_START_ROUNDS, _START_ROUNDS)
        started = time_start(session, model, reopen, trust=trust, rounds=rounds)
        if started is not None:
            ratios["start"] = _ratio(started.comparisons["session"], "reference")
    return ratios


def _ratio(comparison: RatioComparison, control: Control, **fields: float) -> LockedRatio:
    return LockedRatio(
        control=control,
        ratio=comparison.ratio,
        low=comparison.low,
        high=comparison.high,
        confidence=comparison.confidence,
        rounds=comparison.rounds,
        **fields,
    )


def time_start(
    session: InferenceSession,
    model: Any,
    reopen: Callable[[], InferenceSession],
    *,
    trust: bool,
    rounds: tuple[int, int],
    expected: float = 1.0,
    budget: float = 60.0,
) -> RoundTimes | None:
    """Time the opening of a session beside that of its reference; ``None`` where the model does not run as one."""
    try:
        open_reference(session, model, trust=trust).close()
    except XpuRuntimeError:
        return None
    return measure(
        {
            "control": timed(lambda: open_reference(session, model, trust=trust).close()),
            "session": timed(lambda: reopen().close()),
        },
        control="control",
        margin=START_MARGIN,
        rounds=rounds,
        budget=budget,
        block=0.0,
        warm=0.0,
        expected=expected,
        settled=lambda comparisons: all(
            comparison.within_limit or comparison.verdict is RatioVerdict.SLOWER for comparison in comparisons.values()
        ),
    )


def peak_of_process(model: Any, policy: Policy, feeds: Mapping[str, Any], *, trust: bool) -> int | None:
    """Return what a process of this interpreter holds at most as it opens a model and runs it.

    ``None`` where the model is a module in memory, the process fails, or the operating system does not say.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    arguments = {"policy": policy.replace(verify=None).to_dict(), "trust": trust}
    with ScratchFolder("lock") as folder:
        inputs = Path(folder, "inputs")
        write_arrays(inputs, feeds)
        path = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
        with session_worker(sys.executable) as worker:
            try:
                worker.call(f"{MODULE}:open_session", model=path, inputs=str(inputs), arguments=arguments)
                worker.call(f"{MODULE}:time_session", calls=1, samples=_RUNS)
                peak: int | None = worker.call(f"{MODULE}:memory_peak")
            except WorkerFailure:
                return None
    return peak


_MOST = 1 << 20


def check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    """Return batch sizes in ascending order. Raises `InputError` for what is none."""
    for rows in batches:
        if type(rows) is not int or not 1 <= rows <= _MOST:
            raise InputError(f"batches: {rows!r} is not a batch size. Fix: give whole numbers from 1 to {_MOST:,}")
    return tuple(sorted(set(batches)))


def times_of_batches(
    session: InferenceSession, shapes: Mapping[str, Sequence[int]], batches: Sequence[int]
) -> tuple[BatchTime, ...]:
    """Return times of runs by batch size, with all other sizes as they are in `shapes`."""
    return time_batches(host_runner(session), lambda rows: feeds_of_rows(session, shapes, rows), batches)


def feeds_of_rows(session: InferenceSession, shapes: Mapping[str, Sequence[int]], rows: int) -> dict[str, Any]:
    """Return probe inputs of a batch of so many rows."""
    axes = batch_axes(session.inputs)[1]
    if not axes:
        raise InputError(
            "batches: no input of the model begins with an open dimension. Fix: leave batches out, or export the model "
            "with an open batch dimension"
        )
    sizes = {name: list(shape) for name, shape in shapes.items()}
    for name, axis in axes.items():
        if name in sizes:
            sizes[name][axis] = rows
    return probe_at(session.model, sizes)


def memory_of_session(
    session: InferenceSession,
    model: Any,
    policy: Policy,
    shapes: Mapping[str, Sequence[int]],
    rows: int,
    *,
    trust: bool,
) -> SessionMemory | None:
    """Return what one more session of the model takes of its device, once it has run a batch of so many rows.

    A process of this interpreter opens two, and the second counts: libraries and the context of a device are there by
    then. ``None`` where the model is a module in memory, the process fails, or the system does not say.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    arguments = {"policy": policy.replace(verify=None).to_dict(), "trust": trust}
    with ScratchFolder("lock") as folder:
        inputs = Path(folder, "inputs")
        write_arrays(inputs, feeds_of_rows(session, shapes, rows))
        path = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
        with session_worker(sys.executable) as worker:
            try:
                memory = worker.call(f"{MODULE}:session_memory", model=path, inputs=str(inputs), arguments=arguments)
            except WorkerFailure:
                return None
    return None if memory is None else SessionMemory(device=memory["device"], bytes=memory["bytes"], rows=rows)
