# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plans for this computer: `plan_here` probes no more engines than it needs, `check_plan` holds a plan of before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import PlanError, PolicyError, XpuRuntimeError
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.planning.candidates import (
    EngineCandidate,
    chooses_among_all_engines,
    find_engine,
    list_candidates,
    normal_device,
    refusal,
)
from xpuruntime.planning.resolve import Resolution, decide, judge_candidate, plan_of

if TYPE_CHECKING:
    from xpuruntime.engines.base import Engine, Judgement
    from xpuruntime.planning.plan import LibraryIdentity, Plan, PlanRequest
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine


def check_plan(
    plan: Plan, request: PlanRequest, policy: Policy, machine: Machine, engines: Mapping[str, Engine]
) -> Judgement:
    """Judge the candidate of a plan again, and only that one, and refuse the plan where anything of it differs."""
    if plan.engine not in engines:
        registered = ", ".join(engines) or "none"
        raise PlanError(
            f"the plan is for the engine {plan.engine}, which is not registered here (registered: {registered}). Fix: "
            "install the package that registers it, or make the plan again",
            engine=plan.engine,
        )
    path = str(request.model.path)
    candidates = list_candidates(policy, machine, engines, request.model.format)
    candidate = next(
        (candidate for candidate in candidates if str(candidate) == plan.candidate),
        EngineCandidate(engine=plan.engine, device=plan.device),
    )
    judgement = judge_candidate(candidate, request, policy, machine, engines)
    if not judgement.verdict.accepted:
        raise refusal([candidate], [judgement.verdict], {}, path)
    now = plan_of(request, policy, machine, engines, candidate, judgement, [judgement.verdict])
    differences = [line for line, differs in _compared(plan, now) if differs]
    if differences:
        lines = "".join(f"\n  {line}" for line in differences)
        raise PlanError(
            f"the plan {plan.candidate} does not fit {path} here:{lines}\n"
            "Fix: make the plan again, or restore what it was made for",
            engine=plan.engine,
            device=plan.device,
        )
    return judgement


def _compared(plan: Plan, now: Plan) -> Iterator[tuple[str, bool]]:
    before, after = plan.model.digest or plan.model.sha256, now.model.digest or now.model.sha256
    yield (
        f"model: the plan is of sha256 {before[:12]} ({plan.model.path}), and this one is {after[:12]}",
        before != after,
    )
    for key, old, new in _differing(plan.policy, now.policy):
        yield f"policy: {key} is {old} in the plan, and {new} is asked for", True
    yield "calibration: the plan is for other calibration inputs", plan.calibration != now.calibration
    yield (
        f"engine: {plan.engine} {plan.engine_version} in the plan, {now.engine_version} here",
        plan.engine_version != now.engine_version,
    )
    for key, old, new in _differing(plan.settings, now.settings):
        yield f"setting: {key} is {old} in the plan, and {new} here", True
    if plan.execution is None or now.execution is None:
        yield "machine: the plan does not note the device and libraries that it was made for", plan.execution is None
        return
    for key, old, new in _differing(
        msgspec.to_builtins(plan.execution.device), msgspec.to_builtins(now.execution.device)
    ):
        yield f"device: {key} is {old} in the plan, and {new} here", True
    for name in ("driver", "xpuruntime"):
        old, new = getattr(plan.execution, name), getattr(now.execution, name)
        yield f"{name}: {old} in the plan, {new} here", old != new
    libraries = {library.name: library for library in plan.execution.libraries}
    here = {library.name: library for library in now.execution.libraries}
    for name in sorted({*libraries, *here}):
        mine, other = _build(libraries.get(name)), _build(here.get(name))
        yield f"library: {name} is {mine} in the plan, and {other} here", mine != other


def _build(library: LibraryIdentity | None) -> str:
    if library is None:
        return "missing"
    facts = (f"version {library.version}", f"build ID {library.build_id}", f"{library.size} bytes")
    return ", ".join(fact for fact in facts if "None" not in fact) or "unknown"


def _differing(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}, key=str):
            yield from _differing(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif (list(old) if isinstance(old, tuple) else old) != (list(new) if isinstance(new, tuple) else new):
        yield prefix, old, new


def possible_engines(request: PlanRequest, policy: Policy, engines: Mapping[str, Engine]) -> tuple[str, ...]:
    """Return the registered engines that could run or compile the model under the policy, in the order of trying."""
    stated = policy.execution.engine
    if chooses_among_all_engines(policy):
        names: list[str | None] = [name for name, engine in engines.items() if engine.automatic]
    else:
        names = [find_engine(name, engines) for name in ((stated,) if isinstance(stated, str) else stated)]
    kind = normal_device(policy.execution.device).partition(":")[0]
    if kind != "auto":  # an engine that never drives the device is refused without being asked
        names = [n for n in names if n is None or kind in (engines[n].device_kinds or (kind,))]
    names.extend(find_engine(candidate.engine, engines) for candidate in policy.execution.fallback_candidates)
    return tuple(
        name
        for name in dict.fromkeys(names)
        if name is not None
        and request.model.format in engines[name].formats
        and (request.purpose != "compile" or engines[name].compiles)
        and (request.artifact is None or request.artifact.manifest.engine == name)
    )


def plan_here(
    request: PlanRequest, policy: Policy, engines: Mapping[str, Engine], snapshot: Callable[[tuple[str, ...]], Machine]
) -> tuple[Resolution, Machine]:
    """Return the plan with its judgement, and the machine it was made for.

    Engines are probed one after the other until one is accepted. Where ``engine`` and ``device`` are both ``auto``,
    the accelerators of all engines come before any CPU, so all are probed at once that may have a device here.
    """
    possible = possible_engines(request, policy, engines)
    if chooses_among_all_engines(policy) and policy.execution.device == "auto":
        cuda = request.purpose != "run" or bool(snapshot(()).cuda)
        rounds = [tuple(name for name in possible if cuda or engines[name].device_kinds != ("cuda",))]
    else:
        rounds = [possible[:count] for count in range(1, len(possible))]
    for names in rounds:
        if names == possible:
            break
        machine = snapshot(names)
        try:
            resolution = decide(request, policy, machine, engines)
        except PolicyError:
            raise
        except XpuRuntimeError:
            continue  # an engine that was not probed yet may take it
        tried = [verdict for verdict in resolution.plan.verdicts if verdict.code != VerdictCode.NOT_TRIED]
        if all(verdict.candidate.partition("@")[0] in names for verdict in tried):
            return resolution, machine
    machine = snapshot(possible)
    try:
        return decide(request, policy, machine, engines), machine
    except PolicyError:
        raise
    except XpuRuntimeError:  # a fix names another engine only if that one runs the model here, so they are probed too
        others = (name for name, engine in engines.items() if engine.automatic and name not in possible)
        machine = snapshot((*possible, *others))
    return decide(request, policy, machine, engines), machine
