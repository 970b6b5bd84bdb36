# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plan check: whether a plan made before, perhaps elsewhere, still holds for a model, policy, machine and engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import PlanError
from xpuruntime.planning.candidates import EngineCandidate, list_candidates
from xpuruntime.planning.refusal import refusal
from xpuruntime.planning.resolve import judge_candidate, plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.engines.base import Engine, Judgement
    from xpuruntime.planning.execution import LibraryIdentity
    from xpuruntime.planning.plan import Plan, PlanRequest
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

__all__ = ["check_plan"]


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
        (one for one in candidates if str(one) == plan.candidate),
        EngineCandidate(engine=plan.engine, device=plan.device),
    )
    judgement = judge_candidate(candidate, request, policy, machine, engines)
    if not judgement.verdict.accepted:
        raise refusal([candidate], [judgement.verdict], {}, path)
    now = plan_of(request, policy, machine, engines, candidate, judgement, [judgement.verdict])
    found = [line for line, differs in _compared(plan, now) if differs]
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise PlanError(
            f"the plan {plan.candidate} does not fit {path} here:{lines}\n"
            "Fix: make the plan again, or restore what it was made for",
            engine=plan.engine,
            device=plan.device,
        )
    return judgement


def _compared(plan: Plan, now: Plan) -> Iterator[tuple[str, bool]]:
    """Yield for each ingredient a line with both values, and whether they differ."""
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
    libraries = {one.name: one for one in plan.execution.libraries}
    here = {one.name: one for one in now.execution.libraries}
    for name in sorted({*libraries, *here}):
        mine, other = _build(libraries.get(name)), _build(here.get(name))
        yield f"library: {name} is {mine} in the plan, and {other} here", mine != other


def _build(library: LibraryIdentity | None) -> str:
    if library is None:
        return "missing"
    facts = (f"version {library.version}", f"build ID {library.build_id}", f"{library.size} bytes")
    return ", ".join(fact for fact in facts if "None" not in fact) or "unknown"


def _differing(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys at which two trees of plain values differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}, key=str):
            yield from _differing(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    elif (list(old) if isinstance(old, tuple) else old) != (list(new) if isinstance(new, tuple) else new):
        yield prefix, old, new
