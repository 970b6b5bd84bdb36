# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SearchContext`: model, base policy, plan, space and reference of one search."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from xpuruntime.engines.accuracy import GENERATED, limits_of, make_references
from xpuruntime.engines.arrays import digest_parts
from xpuruntime.engines.input_binding import ConversionLog, InputValidator
from xpuruntime.engines.model.external import model_digest
from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.engines.precision import probe_feeds, probing
from xpuruntime.engines.quantization import uses_calibration
from xpuruntime.engines.quantization.calibration import SampleError, open_source
from xpuruntime.errors import InputError, PlanError, PolicyError, UnsupportedOperationError
from xpuruntime.evidence.tolerances import RANDOM_FIX, Tolerance, compare_within
from xpuruntime.inference.plan_request import PlannedModel, plan_session
from xpuruntime.locks.determinism.grades import NoBatch, other_inputs
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.policies import Policy
from xpuruntime.runtime.cpu_and_memory import CpuCores, cpu_cores
from xpuruntime.runtime.snapshot import probed
from xpuruntime.tuning.runner import RunnerJob
from xpuruntime.tuning.space import BATCH, Planner, build_space
from xpuruntime.tuning.trial import Candidate, policy_device, trial_devices

if TYPE_CHECKING:
    import os

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.inference.session_arguments import SessionArguments
    from xpuruntime.planning import PlanRequest
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.tuning.ray_cluster import RayCluster
    from xpuruntime.tuning.spec.parts import SearchSpace
    from xpuruntime.tuning.spec.tune_spec import TuneSpec

_PRECISION = "execution.precision"


class SearchContext:
    """Model, base policy, plan, space and reference of one search."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        arguments: SessionArguments,
        spec: TuneSpec,
        registry: EngineRegistry,
        machine: Machine | None,
        calibration: str | os.PathLike[str] | None,
        cluster: RayCluster | None = None,
    ) -> None:
        self.model_path, self.spec, self.trust = Path(model).resolve(), spec, arguments.trust
        self.calibration = None if calibration is None else str(Path(calibration).resolve())
        if arguments.policy is not None and (lock := Policy.coerce(arguments.policy).execution.lock) is not None:
            msg = f"the policy states execution.lock: {lock}, and a search changes what a lock holds. Fix: leave it out"
            raise PolicyError(msg)
        planned = _planned(model, arguments, registry, machine, self.calibration)
        if spec.devices and planned.policy.execution.device == "auto":
            arguments = arguments._replace(device=policy_device(spec.devices[0]))
            planned = _planned(model, arguments, registry, machine, self.calibration)
        request, plan, here, policy = planned.request, planned.plan, planned.machine, planned.policy
        self.request: PlanRequest = request
        self.plan, self.registry = plan, registry
        if spec.space.batch and (padded := policy.execution.static_batch) is not None:
            msg = f"space.batch searches the batch, and execution.static_batch: {padded} fixes it. Fix: leave one out"
            raise PolicyError(msg)
        accuracy = spec.constraints.accuracy
        self.base = policy if isinstance(accuracy, str) else policy.replace(accuracy=accuracy)
        self.digest = model_digest(request.model)
        self.grade = spec.constraints.determinism or policy.execution.determinism
        self.notes: tuple[str, ...] = ()
        self._jobs: dict[str, RunnerJob] = {}
        wanted, within = spec.space, None
        if cluster is not None:
            self.devices, within = cluster.devices(plan.device), cluster.threads
            size = self.devices[0].hardware
            self.cores = CpuCores(size["cores"], size["threads"]) if within is None else CpuCores(within, within)
        else:
            self.devices = trial_devices(spec.devices, plan.device, here)
            self.cores = cpu_cores(self.devices[0].cores or None)
            within = self.cores.logical if self.devices[0].cores else None
        if within is not None and plan.device == "cpu":
            wanted = self._limit_threads(policy)
        self.call, why = _call_mode(spec, policy, plan.device)
        self.notes += why
        self.planner = Planner(request, self.base, registry, machine, most_threads=within)
        names = spec.space.engine or _engines(policy, registry, request.model.format)
        missing = {
            engine.name: probed(engine) for engine in map(registry.get, names) if engine.name not in here.engines
        }
        self.machine = full = here.with_engines({**here.engines, **missing})
        declared = {
            known.name: known.tunables(request.model, plan.device, full)
            for known in (registry.get(name) for name in names)
        }
        self.space = build_space(
            policy, wanted, declared, device=plan.device, cores=self.cores, accuracy=self.base.accuracy is not None,
            graphs=self.call == "bind", batch=spec.objective.batch,
        )  # fmt: skip
        self.stated_keys = _stated_keys(spec)
        self._check_calibration()

    def _check_calibration(self) -> None:
        execution, model = self.base.execution, self.request.model
        values = {value for tunable in self.space.tunables.values() for key in tunable if key.key == _PRECISION
                  for value in key.values}  # fmt: skip
        policies = [
            self.base.replace(execution=execution.replace(precision=precision))
            for precision in {execution.precision, *values}
        ]
        if self.calibration is None or any(uses_calibration(policy, model) for policy in policies):
            return
        if (scheme := model.quantization.scheme) != "none":
            raise InputError(f"calibration: the model is quantized already ({scheme})", fix="leave calibration out")
        raise InputError(
            f"calibration: no candidate is quantized, since precision is {execution.precision} and not searched",
            fix="state space.precision: [model, int8], or leave calibration out",
        )

    def _limit_threads(self, policy: Policy) -> SearchSpace:
        """Keep candidates to the cores they have: engines take and bind those of the machine by default."""
        wanted, most = self.spec.space, self.cores.physical
        stated = policy.execution.threads
        if stated is not None:
            return wanted
        self.base = self.base.replace(execution=self.base.execution.replace(threads=most))
        self.notes = (
            f"candidates had {self.cores.logical} cores each: the policy leaves threads open, and states {most} here",
        )
        return wanted if wanted.threads else wanted.replace(threads=("engine", 1, "logical"))

    def journal_header(self, inputs: str) -> dict[str, Any]:
        """Return what a journal must be of."""
        what = self.spec.to_dict()
        for name in ("budget", "isolation", "inputs", "base", "devices", "ray"):
            what.pop(name, None)
        what["objective"] = {name: value for name, value in what.get("objective", {}).items() if name != "call"}
        return {
            "version": version("xpuruntime"),
            "model": self.digest,
            "policy": self.base.to_dict(),
            "spec": what,
            "call": self.call,
            "inputs": inputs,
            "calibration": self.calibration,
            "engines": {name: engine.version for name, engine in sorted(self.machine.engines.items())},
            "cores": list(self.cores),
            "devices": [device.name if self.spec.ray is None else "a Ray node" for device in self.devices],
            "hardware": self.devices[0].hardware,
        }

    def write_samples(self, samples: Samples, room: Path) -> int:
        """Write inputs, and what the reference answers to them."""
        arguments = self.request.on(self.plan.device, self.base)
        engine = None if self.request.model.format == "onnx" else self.registry.get(self.plan.engine)
        undecided: dict[str, str] = {}
        exact = Tolerance(rtol=0.0, atol=0.0, cosine=0.0)
        with probing(self.request.model, samples.feeds[0], generated=samples.origin == GENERATED):
            references = make_references(arguments, engine, self.machine, samples.feeds)
        for index, reference in enumerate(references):
            write_arrays(room / f"inputs-{index}", reference.feeds)
            outputs = {name: value for name, value in reference.outputs.items() if isinstance(value, np.ndarray)}
            if len(outputs) != len(reference.outputs):
                missing = next(name for name in reference.outputs if name not in outputs)
                raise UnsupportedOperationError(
                    f"the output {missing!r} is no tensor, and candidates cannot be compared"
                )
            write_arrays(room / f"outputs-{index}", outputs)
            for output in compare_within(outputs, outputs, exact, self.request.model.random_outputs).outputs:
                undecided[output.name] = output.undecided and undecided.get(output.name, output.undecided)
        self._check_compared(undecided)
        return len(samples.feeds)

    def _check_compared(self, undecided: dict[str, str]) -> None:
        """Refuse inputs for which no output can be compared with anything; those that cannot be are a note."""
        idle = "; ".join(f"{reason} in {name!r}" for name, reason in undecided.items() if reason)
        if all(undecided.values()):
            real = "give inputs like those that the model will get"
            raise InputError(
                f"inputs: with none of them a wrong candidate could be told from a right one: "
                f"{idle or 'the model has no output'}",
                fix=RANDOM_FIX if self.request.model.random_outputs else real,
            )
        if idle:
            self.notes += (f"outputs that were not compared: {idle}",)

    def job(self, candidate: Candidate, samples: Mapping[int, tuple[str, int]]) -> RunnerJob:
        """Return what a runner is to do for a candidate: the same for each call, planned once.

        `samples` has the folder of the inputs of a batch, and how many there are.
        """
        if candidate.id in self._jobs:
            return self._jobs[candidate.id]
        policy = Policy.coerce(candidate.policy)
        planned = self.planner.plan(candidate.changes)
        limits = limits_of(self.request.on(candidate.device, policy), getattr(planned, "computes", None))
        load = self.spec.objective
        rows = candidate.changes.get(BATCH, load.batch)
        folder, count = samples[rows]
        self._jobs[candidate.id] = job = RunnerJob(
            model=str(self.model_path), policy=candidate.policy, trust=self.trust,
            calibration=self.calibration if uses_calibration(policy, self.request.model) else None,
            samples=folder, count=count, tolerance=msgspec.to_builtins(limits), objective=load.name, batch=rows,
            concurrency=load.concurrency, call=self.call,
        )  # fmt: skip
        return job


def _planned(
    model: Any, arguments: SessionArguments, registry: EngineRegistry, machine: Machine | None, calibration: Any
) -> PlannedModel:
    try:
        return plan_session(model, arguments, registry, machine, calibration=calibration, purpose="search")
    except PlanError as error:
        raise PlanError(f"the policy that is to be tuned cannot run itself: {error}") from error


def _call_mode(spec: TuneSpec, policy: Policy, device: str) -> tuple[str, tuple[str, ...]]:
    stated, batch, padded = spec.objective.call, spec.objective.batch, policy.execution.static_batch
    graphs = policy.execution.cuda_graph != "off" or any(mode != "off" for mode in spec.space.cuda_graph)
    call = stated or ("bind" if graphs and device.startswith("cuda") else "run")
    if call == "bind" and padded is not None and padded != batch:
        raise PolicyError(
            f"objective.call: bind, and bound buffers are not padded to execution.static_batch: {padded}. Fix: state "
            f"objective.batch: {padded}, or call: run"
        )
    if stated is None and call == "bind":
        return call, ("bound runs were timed, because CUDA graphs are asked for and plain runs use none",)
    return call, ()


def _engines(policy: Policy, registry: EngineRegistry, model_format: str) -> tuple[str, ...]:
    stated = policy.execution.engine
    if not isinstance(stated, str):
        return stated
    return tuple(engine.name for engine in registry if engine.automatic and model_format in engine.formats)


def _stated_keys(spec: TuneSpec) -> list[str]:
    space = spec.space
    keys = [BATCH] if space.batch else []
    keys += [f"execution.{name}" for name in ("precision", "cuda_graph", "layout", "threads") if getattr(space, name)]
    for engine, options in space.options.items():
        keys += [f"execution.provider_options.{engine}.{name}" for name in options]
    return keys


RANDOM = "random"
#: Inputs that outputs are compared for at most; those that are generated.
_MOST, _MADE = 64, 8


class Samples(NamedTuple):
    """Inputs of single runs, where they are from, a digest over all, and a note on them."""

    feeds: list[dict[str, Any]]
    origin: str
    digest: str
    note: str | None


def read_samples(data: Any, model: ModelInfo, *, batch: int, seed: int) -> Samples:
    """Return the inputs of runs."""
    if data is None:
        raise InputError(
            "a search needs inputs like those that the model will get. Fix: give an .npz file or a folder of them, or "
            "'random' to have some generated (`--input samples.npz`, `--input random`)"
        )
    note: str | None
    if isinstance(data, str) and data == RANDOM:
        feeds, origin = _made_up(model, batch, seed), GENERATED
        note = f"the inputs were generated (seed {seed}): times and errors of real ones may differ"
    else:
        feeds, origin, left = _given(data, model, batch)
        note = f"of {left} inputs, the first {len(feeds)} were used" if left > len(feeds) else None
    if len(feeds) == 1:  # outputs of the input before would be right
        feeds.append(other_inputs(feeds[0], NoBatch("one input"))[0])
    digest = hashlib.sha256()
    for feed in feeds:
        for part in digest_parts(feed):
            digest.update(part)
    return Samples(feeds, origin, digest.hexdigest(), note)


def _made_up(model: ModelInfo, batch: int, seed: int) -> list[dict[str, Any]]:
    key, axes = batch_axes(model.inputs)
    name = key if key is not None else f"{next(iter(axes))}.0" if axes else None
    if name is None and batch > 1:
        _refuse_batch(model, batch)
    dims = None if name is None else {name: batch}
    return [probe_feeds(model, seed=seed + index, dims=dims) for index in range(_MADE)]


def _given(data: Any, model: ModelInfo, batch: int) -> tuple[list[dict[str, Any]], str, int]:
    """Return batches of the first samples, where they are from, and how many batches there are."""
    axes = batch_axes(model.inputs)[1]
    if batch > 1 and not axes:
        _refuse_batch(model, batch)
        batch = 1  # the model fixes that batch: each sample is one
    first = next(iter(axes), "")
    samples: list[dict[str, Any]] = []
    rows = 0  # of all samples; those that no batch needs are counted, and not kept
    try:
        source = open_source(data, model)
        for sample in _checked(source, model):
            if rows < _MOST * batch:
                samples.append(sample)
            rows += sample[first].shape[axes[first]] if batch > 1 else 1
    except SampleError as error:
        raise InputError(f"inputs: {error.reason}") from None
    if not samples:
        raise InputError(f"inputs: {source.origin} holds no samples. Fix: give at least one")
    if batch == 1:
        return samples, source.origin, rows
    if rows < batch:
        raise InputError(
            f"inputs: {source.origin} has {rows} rows, and a batch of {batch} is asked for. Fix: give {batch} rows or "
            "more, or a smaller objective.batch"
        )
    joined = {
        name: np.concatenate([sample[name] for sample in samples], axes[name]) if name in axes else array
        for name, array in samples[0].items()
    }
    count = rows // batch
    batches = [
        {
            name: np.take(array, range(index * batch, (index + 1) * batch), axes[name]) if name in axes else array
            for name, array in joined.items()
        }
        for index in range(min(count, _MOST))
    ]
    return batches, source.origin, count


def _refuse_batch(model: ModelInfo, batch: int) -> None:
    first = next((input_.shape[0] for input_ in model.inputs if input_.shape), None)
    if first != batch:
        raise InputError(
            f"a batch of {batch} is asked for, and the model has no open batch dimension: its inputs begin with "
            f"{first}. Fix: state objective.batch: {first or 1}"
        )


def _checked(source: Any, model: ModelInfo) -> Iterator[dict[str, Any]]:
    check = InputValidator(
        (*model.inputs, *model.overridable_inputs), [input_.name for input_ in model.overridable_inputs]
    )
    log = ConversionLog()
    for index, (origin, sample) in enumerate(source):
        try:
            ready = check.on_host(sample, strict=False, log=log)
        except InputError as error:
            raise InputError(f"inputs: sample {index} ({origin}): {error}") from None
        wrong = [name for name, array in ready.items() if not isinstance(array, np.ndarray)]
        if wrong:
            raise InputError(
                f"inputs: sample {index} ({origin}): input {wrong[0]!r} is not an array. Fix: give a tensor"
            )
        yield {name: np.array(array) for name, array in ready.items()}
