# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plan requests: from the arguments of a session to policy, model and machine, and from these to its plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import msgspec

from xpuruntime.argument_types import MACHINE, check_types
from xpuruntime.engines.registry import EngineRegistry, known_engines
from xpuruntime.errors import InputError, LockError, PolicyError, XpuRuntimeError, warn
from xpuruntime.files.paths import kind_of, with_home
from xpuruntime.inference.session_arguments import SessionArguments, settle_policy
from xpuruntime.runtime.telemetry import traced

if TYPE_CHECKING:
    import os

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.base import Judgement
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantization import Calibration
    from xpuruntime.inference.locked import LockInForce
    from xpuruntime.inference.session_arguments import ModelLike, PolicyAliases, PolicyLike
    from xpuruntime.planning import Plan, PlanRequest, Resolution
    from xpuruntime.policies import Policy
    from xpuruntime.policies.execution_policy import Precision
    from xpuruntime.runtime.machine import EngineFacts, Machine


def plan(
    model: ModelLike,
    policy: PolicyLike | None = None,
    *,
    device: str | None = None,
    engine: str | Sequence[str] | None = None,
    precision: Precision | None = None,
    lock: str | os.PathLike[str] | None = None,
    frozen: bool = False,
    trust: bool = False,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    calibration: Any = None,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
    **aliases: Unpack[PolicyAliases],
) -> Plan:
    """Decide what would run, without loading anything.

    Parameters are those of `InferenceSession`.

    Returns
    -------
    Plan
        The chosen engine and device, every rejected candidate with its reason and fix, and the enforceability of each
        policy key.
    """
    engines = known_engines(registry)
    arguments = SessionArguments(policy, device, engine, precision, lock, frozen, trust).with_aliases(aliases, "plan")
    return plan_session(model, arguments, engines, machine, example_inputs=example_inputs, calibration=calibration).plan


class PlannedModel(msgspec.Struct, frozen=True):
    """A model that was read and planned: all that a session is opened from."""

    request: PlanRequest
    plan: Plan
    judgement: Judgement
    machine: Machine
    policy: Policy
    lock: LockInForce | None


def _described(planned: PlannedModel) -> dict[str, Any]:
    plan = planned.plan
    facts = {"model": plan.model.path, "mode": plan.mode, "policy_source": plan.policy_source}
    return {**facts, "engine": plan.engine, "device": plan.device, "precision": plan.precision}


@traced("plan", _described)
def plan_session(
    model: ModelLike,
    arguments: SessionArguments,
    registry: EngineRegistry,
    machine: Machine | None,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    calibration: Any = None,
    purpose: Literal["run", "compile", "search"] = "run",
    defer: bool = False,
) -> PlannedModel:
    """Read a model, settle its policy and plan it; with `defer`, the engine that is chosen may check nodes itself."""
    from xpuruntime.artifacts.manifest import find_artifact
    from xpuruntime.engines.registry import read_model

    _check_machine(machine)
    arguments = arguments.checked()
    artifact = find_artifact(model) if purpose != "compile" else None
    read = functools.partial(read_model, model, example_inputs, trust=arguments.trust)
    planned_of = functools.partial(_planned, arguments, artifact, registry, machine, calibration, purpose)
    if artifact is not None:
        return planned_of(artifact.manifest.model)
    info = read(defer=defer)
    if info.deferred:
        with contextlib.suppress(XpuRuntimeError):  # the check may know more
            planned = planned_of(info)
            if registry.get(planned.plan.engine).compares_nodes(planned.judgement):
                return planned
        info = read()
    return planned_of(info)


def _planned(
    arguments: SessionArguments,
    artifact: Artifact | None,
    registry: EngineRegistry,
    machine: Machine | None,
    calibration: Any,
    purpose: Literal["run", "compile", "search"],
    info: ModelInfo,
) -> PlannedModel:
    from xpuruntime.inference.session_arguments import check_export_lock

    policy, source, notes, named = settle_policy(arguments, artifact, info)
    lock = None
    if named is not None:
        from xpuruntime.inference.locked import lock_in_force

        own, where = (named.policy, named.where) if arguments.policy is None else (policy, None)
        calibration = calibration_of(calibration, own, info, artifact=artifact, lock=where)
        machine_of = functools.partial(_machine_of, registry) if machine is None else lambda _: machine
        lock = lock_in_force(named, policy, info, machine_of, calibration, artifact)
        policy = lock.policy
    request = _request(info, policy, calibration, artifact, purpose)
    (plan, judgement), here = plan_request(request, policy, registry, machine)
    plan = msgspec.structs.replace(plan, policy_source=source, notes=(*plan.notes, *notes))
    plan = check_export_lock(info, plan) if lock is None else lock.checked(plan)
    return PlannedModel(request, plan, judgement, here, policy, lock)


@traced("plan", _described)
def reopen_plan(
    model: ModelLike,
    plan: Plan,
    arguments: SessionArguments,
    registry: EngineRegistry,
    machine: Machine | None,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    calibration: Any = None,
) -> PlannedModel:
    """Read a model and check that a plan of before holds for it here; only the plan's engine is probed and asked."""
    from xpuruntime.artifacts.manifest import find_artifact
    from xpuruntime.engines.registry import read_model
    from xpuruntime.planning import Plan
    from xpuruntime.planning.reopening import check_plan
    from xpuruntime.policies import Policy

    _check_machine(machine)
    if not isinstance(plan, Plan):
        msg = f"plan is an object of type {type(plan).__name__}, not a Plan. Fix: read it with Plan.from_json"
        raise InputError(msg)
    arguments = arguments.checked()
    policy = arguments.merged(Policy.coerce(plan.policy))
    artifact = find_artifact(model)
    info = artifact.manifest.model if artifact is not None else read_model(model, example_inputs, trust=arguments.trust)
    request = _request(info, policy, calibration, artifact, "run")
    engines = registry.engines()
    if machine is None:
        machine = _machine_of(registry, (plan.engine,) if plan.engine in engines else ())
    judgement = check_plan(plan, request, policy, machine, engines)
    return PlannedModel(request, plan, judgement, machine, policy, None)


def warn_of(plan: Plan, *, after: int = 0) -> None:
    """Warn of what a plan warns of, without the first `after` warnings, which were given before."""
    lines = plan.warnings[after:]
    if lines:
        text = lines[0] if len(lines) == 1 else "\n  ".join(("", *lines))
        warn(f"{plan.engine}@{plan.device}: {text}")


def _check_machine(machine: Any) -> None:
    check_types({"machine": MACHINE}, {"machine": machine}, optional=("machine",))


def _request(
    info: ModelInfo,
    policy: Policy,
    calibration: Any,
    artifact: Artifact | None,
    purpose: Literal["run", "compile", "search"],
) -> PlanRequest:
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.planning import PlanRequest

    if artifact is None:
        info = with_shapes(info, policy)
    calibration = calibration_of(calibration, policy, info, artifact=artifact)
    return PlanRequest(model=info, calibration=calibration, artifact=artifact, purpose=purpose)


def plan_request(
    request: PlanRequest, policy: Policy, registry: EngineRegistry, machine: Machine | None
) -> tuple[Resolution, Machine]:
    """Plan for a machine, or for this one. Return the plan with its judgement, and the machine it was made for."""
    from xpuruntime.planning import decide, plan_here

    engines = registry.engines()
    if machine is not None:
        return decide(request, policy, machine, engines), machine
    return plan_here(request, policy, engines, functools.partial(_machine_of, registry))


@functools.lru_cache(maxsize=32)
def _machine_of(registry: EngineRegistry, names: tuple[str, ...]) -> Machine:
    """Return this computer with the facts of some engines, each probed once a process: nothing changes under it."""
    from xpuruntime.runtime.snapshot import machine_snapshot

    if not names:
        return machine_snapshot()
    *others, last = names
    known = _machine_of(registry, tuple(others))
    return known.with_engines({last: _facts_of(registry, last)})


@functools.lru_cache(maxsize=64)
def _facts_of(registry: EngineRegistry, name: str) -> EngineFacts:
    from xpuruntime.runtime.snapshot import probed

    return probed(registry.get(name))


def calibration_of(
    stated_calibration: Any,
    policy: Policy,
    info: ModelInfo,
    *,
    artifact: Artifact | None = None,
    lock: str | None = None,
) -> Calibration | None:
    """Return the inputs to quantize with, compared with the digest that the policy states."""
    stated = policy.calibration
    if stated_calibration is None and (stated is None or artifact is not None):
        return None
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.quantization import Calibration

    if artifact is None:
        info = with_shapes(info, policy)
    if stated_calibration is None:
        assert stated is not None
        path = with_home(str(stated.path), "calibration.path")
        if kind_of(path) not in ("file", "folder"):
            raise _missing(str(path), str(stated.digest), lock)
        stated_calibration = path
    calibration = Calibration.of(stated_calibration, info)
    if calibration is not None and stated is not None and lock is None:
        _check(calibration, stated.digest, stated.samples)
    return calibration


def _missing(path: str, digest: str, lock: str | None) -> PolicyError | LockError:
    fix = "restore it, or name the inputs with calibration= (--calibration PATH)"
    if lock is not None:
        return LockError(
            f"the lock {lock} does not hold: calibration: expected {digest}, found no file or folder "
            f"{path!r}. Fix: {fix}"
        )
    return PolicyError(
        f"calibration.path: there is no file or folder {path!r}, which the policy names with the digest {digest}. "
        f"Fix: {fix}; in a policy file it is relative to that file"
    )


def _check(calibration: Calibration, digest: str | None, samples: int | None) -> None:
    has = f"sha256:{calibration.digest}"
    where = f"{calibration.origin} has {calibration.count} samples with the digest {has}"
    fix = "restore the inputs, or state what `xrt policy calibration MODEL PATH` prints"
    if samples is not None and calibration.count != samples:
        raise PolicyError(f"calibration.samples: {where}, and the policy states {samples} samples. Fix: {fix}")
    if has != digest:
        raise PolicyError(f"calibration.digest: {where}, and the policy states {digest}. Fix: {fix}")
