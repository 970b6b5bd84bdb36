# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`tune`: find the fastest policy that keeps the constraints, or the proof that nothing is faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.argument_types import CALLABLE, FLAG, MACHINE, NAMES, NUMBER, PATH, TEXT, check_types
from xpuruntime.engines.registry import EngineRegistry, known_engines
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.files.journal import Journal
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.inference.session_arguments import SessionArguments
from xpuruntime.lockfile.records import utc_now
from xpuruntime.measuring.conditions import between, moment, open_meter
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.policies.kernel_rules import FAMILIES
from xpuruntime.tuning.context import SearchContext, read_samples
from xpuruntime.tuning.ray_cluster import RayCluster, job_on_node, search_files
from xpuruntime.tuning.space import BATCH, Rejected, kernel_values
from xpuruntime.tuning.spec.parts import Objective, RayPlacement
from xpuruntime.tuning.spec.tune_spec import TuneSpec
from xpuruntime.tuning.trial import CONTROL, Candidate, Measurements, TrialDevice
from xpuruntime.tuning.trial_executors import FRESH_PROCESS_OBJECTIVES, Executor, LocalExecutor, ProcessExecutor
from xpuruntime.tuning.tune_result import CandidateResult, TuneProgress, TuneResult
from xpuruntime.tuning.tune_search import Search

if TYPE_CHECKING:
    from xpuruntime.inference.session_arguments import PolicyLike
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.tuning.runner import RunnerJob


def tune(
    model: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    spec: TuneSpec | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    objective: str | None = None,
    call: str | None = None,
    inputs: Any = None,
    budget: float | None = None,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: str | None = None,
    engine: Any = None,
    precision: Any = None,
    calibration: str | os.PathLike[str] | None = None,
    devices: Sequence[str] | None = None,
    ray: str | RayPlacement | Mapping[str, Any] | None = None,
    trust: bool = False,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[TuneProgress], None] | None = None,
) -> TuneResult:
    """Search the fastest policy for a model that keeps the constraints.

    Parameters
    ----------
    model : str or path
        A model file.
    policy : Policy, path, mapping, or ``"auto"``, optional
        The user's own: what it states is fixed, and every gain is measured against it. In place of the `base` of the
        specification.
    spec : TuneSpec, path or mapping, optional
        What is searched, under which constraints; see `TuneSpec`.
    objective : str, optional
        ``"latency.p50"``, ``"latency.p99"``, ``"throughput"``, ``"memory"``, ``"energy"`` or ``"cold_start"``, in place
        of that of the specification.
    call : {"run", "bind"}, optional
        How the model is called, in place of `Objective.call`.
    inputs : path, mapping, list or ``"random"``, optional
        As `TuneSpec.inputs`, in place of it; or arrays as `Calibration` takes them.
    budget : float, optional
        Seconds, in place of those of the specification.
    journal : str or path, optional
        Keeps what was measured.
    resume : bool
        Go on with the journal, without measuring again what is in it.
    device, engine, precision, trust, machine
        As for `InferenceSession`.
    calibration : path, optional
        Inputs to quantize with; without them ``int8`` is refused by the plan of a model in floats.
    devices : sequence of str, optional
        As `TuneSpec.devices`, in place of them.
    ray : str, RayPlacement or mapping, optional
        The address of a Ray cluster, in place of `TuneSpec.ray.address`; or all of `TuneSpec.ray`.
    registry : EngineRegistry, optional
        Needs ``isolation: none``, unless its engines are installed as plugins.
    cancel : callable, optional
        Asked before each measurement; true ends the search.
    progress : callable, optional
        Called before each measurement.

    Returns
    -------
    TuneResult

    Raises
    ------
    PolicyError
        For a bad specification.
    InputError
        No inputs are given, they do not fit the model, or the journal is of another search.
    UnsupportedOperationError
        The objective cannot be measured here; a device is missing or unlike the others; or there is no cluster with
        room for a trial.
    EngineUnavailable
        `ray` is given, and Ray is not installed.
    XpuRuntimeError
        The model does not run as the reference, in fp32 on the CPU.

    Examples
    --------
    >>> import xpuruntime as xrt
    >>> found = xrt.tune(
    ...     xrt.demo_model_path(),
    ...     {"execution": {"device": "cpu", "engine": "onnxruntime"}},
    ...     inputs="random",
    ...     spec={"space": {"threads": [1], "options": {"onnxruntime": {}}, "kernels": "off"}},
    ...     budget=30.0,
    ... )
    >>> found.candidates[0].id
    'c0'
    """
    began = time.monotonic()
    types = {
        "objective": TEXT, "call": TEXT, "budget": NUMBER, "journal": PATH, "resume": FLAG, "calibration": PATH,
        "devices": NAMES, "machine": MACHINE, "cancel": CALLABLE, "progress": CALLABLE,
    }  # fmt: skip
    check_types(types, locals(), optional=types)
    stated = _merge_arguments(TuneSpec.coerce(spec), objective, call, budget, policy, devices, ray)
    data = stated.inputs if inputs is None else inputs
    if not isinstance(model, (str, os.PathLike)):
        raise InputError("a search opens the model in other processes. Fix: export it to a file first")
    with ExitStack() as stack:
        arguments = SessionArguments(
            device=device, engine=engine, precision=precision, trust=trust,
            policy=policy if policy is not None else stated.base,
        )  # fmt: skip
        known = known_engines(registry)
        cluster = None
        if stated.ray is not None:
            cuda = arguments.checked().merged().execution.device.startswith("cuda")
            cluster = stack.enter_context(RayCluster(stated.ray, cuda=cuda))
            machine = machine if machine is not None else cluster.machine
        context = SearchContext(model, arguments, stated, known, machine, calibration, cluster)
        for target in context.devices[: 1 if cluster is not None else None]:
            _refuse_unmeasurable(stated, target, cluster)
        if stated.space.batch and isinstance(data, Iterator):
            data = list(data)  # read once for each batch
        samples = read_samples(data, context.request.model, batch=stated.objective.batch, seed=stated.seed)
        room = Path(stack.enter_context(ScratchFolder("tune")))
        of_batch = {stated.objective.batch: (str(room), context.write_samples(samples, room))}
        for rows in set(stated.space.batch) - {stated.objective.batch}:
            samples = read_samples(data, context.request.model, batch=rows, seed=stated.seed)
            (folder := room / f"batch-{rows}").mkdir()
            of_batch[rows] = (str(folder), context.write_samples(samples, folder))
        log = stack.enter_context(
            Journal(journal, "tune_journal/2", context.journal_header(samples.digest), resume=resume)
        )
        before, earlier = moment(), log.elapsed

        def clock() -> float:
            return earlier + time.monotonic() - began

        def job_of(candidate: Candidate) -> RunnerJob:
            return context.job(candidate, of_batch)

        executors = _open_executors(context, job_of, registry, cluster, room)
        for executor in executors:
            stack.callback(executor.close)
        search = Search(
            stated, context.space, context.planner.plan, Measurements(log, executors, clock, cancel),
            grade=context.grade, kernels=kernel_values(stated.space, FAMILIES), stated=context.stated_keys,
            progress=progress,
        )  # fmt: skip
        outputs = search.run()
        elapsed = clock()
        log.finish(elapsed)
        notes = [*([samples.note] if samples.note else []), *context.notes, *outputs.notes]
        notes += [f"while it was measured, {remark}" for remark in between(before, moment()).remarks()]
        winner = next(
            (candidate for candidate in outputs.candidates if candidate.id == (outputs.winner or CONTROL)), None
        )
        changes = winner.changes if winner is not None and outputs.winner else {}
        planned = context.planner.plan(changes)
        return TuneResult(
            created=utc_now(), version=version("xpuruntime"), model=str(model), model_sha256=context.digest,
            objective=stated.objective.name, batch=changes.get(BATCH, stated.objective.batch),
            concurrency=stated.objective.concurrency,
            call=context.call,  # type: ignore[arg-type]
            inputs=samples.origin, devices=tuple(device.name for device in context.devices),
            hardware=context.devices[0].hardware, verdict=outputs.verdict,  # type: ignore[arg-type]
            reason=outputs.reason, winner=outputs.winner, gain=outputs.gain,
            changes=changes, policy={} if isinstance(planned, Rejected) else planned.policy.to_dict(),
            min_effect=stated.decide.min_effect, confidence=stated.decide.confidence, candidates=outputs.candidates,
            front=_pareto_front(outputs.candidates), stages=outputs.stages, elapsed=elapsed, budget=stated.budget.time,
            notes=tuple(dict.fromkeys(notes)),
        )  # fmt: skip


def _open_executors(
    context: SearchContext,
    job_of: Callable[[Candidate], RunnerJob],
    registry: EngineRegistry | None,
    cluster: RayCluster | None,
    samples: Path,
) -> Sequence[Executor]:
    constraints = context.spec.constraints
    if cluster is not None:
        shared = context.spec.ray is not None and context.spec.ray.model == "shared"
        files, mine = search_files(context.model_path, context.request.model, context.calibration, samples)
        shipped = cluster.put_files(files, mine if shared else ())
        return cluster.executors(
            lambda candidate: job_on_node(job_of(candidate), shared=shared), constraints, context.plan.device, shipped
        )
    if context.spec.isolation == "none":
        return [LocalExecutor(job_of, constraints, device, registry) for device in context.devices]
    return [ProcessExecutor(job_of, constraints, device) for device in context.devices]


def _merge_arguments(
    spec: TuneSpec,
    objective: str | None,
    call: str | None,
    budget: float | None,
    policy: PolicyLike | None,
    devices: Sequence[str] | None,
    ray: str | RayPlacement | Mapping[str, Any] | None,
) -> TuneSpec:
    changes: dict[str, Any] = {}
    load = spec.objective
    if objective is not None:
        load = Objective.named(objective, batch=load.batch, concurrency=load.concurrency, call=load.call)
    if call is not None:
        load = load.replace(call=call)
    if load != spec.objective:
        changes["objective"] = load
    if budget is not None:
        changes["budget"] = spec.budget.replace(time=float(max(min(budget, 1e300), -1)))
    if devices is not None:
        changes["devices"] = devices if isinstance(devices, str) else tuple(devices)
    if ray is not None:
        changes["ray"] = (spec.ray or RayPlacement()).replace(address=ray) if isinstance(ray, str) else ray
    if policy is not None and spec.base is not None:
        raise InputError(f"the specification has the base policy {spec.base}, and another is given. Fix: leave out one")
    return spec.replace(**changes) if changes else spec


def _refuse_unmeasurable(spec: TuneSpec, device: TrialDevice, cluster: RayCluster | None) -> None:
    name = spec.objective.name
    if cluster is not None:
        if reason := cluster.unmeasurable(name, device.device):
            raise UnsupportedOperationError(f"on the node {device.name}, {reason}")
    elif name == "energy":
        open_meter(device.device)
    if name in FRESH_PROCESS_OBJECTIVES and spec.isolation == "none":
        raise UnsupportedOperationError(
            f"{name} can be measured only in a new process for each candidate, and isolation is none. Fix: state "
            "isolation: process"
        )


def _pareto_front(candidates: tuple[CandidateResult, ...]) -> tuple[str, ...]:
    """Return the candidates that ran, of which none other is better in figure, memory and error at once."""
    places = {
        candidate.id: (candidate.figure, candidate.memory or 0, candidate.error or 0.0)
        for candidate in candidates
        if candidate.figure is not None
        and candidate.code
        not in (CandidateCode.INACCURATE, CandidateCode.CRASHED, CandidateCode.TIMEOUT, CandidateCode.RUN_FAILED)
    }
    return tuple(
        name
        for name, mine in places.items()
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in places.values())
    )
