# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`plan_here`: a plan for this computer that probes no more engines than it needs.

A probe may import a vendor's package, which takes time and memory, so an engine that cannot be chosen is not probed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import PolicyError, XpuRuntimeError
from xpuruntime.evidence.verdict_codes import VerdictCode
from xpuruntime.planning.candidates import chooses_among_all_engines, find_engine, normal_device
from xpuruntime.planning.resolve import decide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.engines.base import Engine
    from xpuruntime.planning.plan import PlanRequest
    from xpuruntime.planning.resolve import Resolution
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

__all__ = ["plan_here", "possible_engines"]


def possible_engines(request: PlanRequest, policy: Policy, engines: Mapping[str, Engine]) -> tuple[str, ...]:
    """Return the registered engines that could run or compile the model under the policy, in the order of trying."""
    asked = policy.execution.engine
    if chooses_among_all_engines(policy):
        names: list[str | None] = [name for name, engine in engines.items() if engine.automatic]
    else:
        names = [find_engine(name, engines) for name in ((asked,) if isinstance(asked, str) else asked)]
    kind = normal_device(policy.execution.device).partition(":")[0]
    if kind != "auto":  # an engine that never drives the device is refused without being asked
        names = [n for n in names if n is None or kind in (engines[n].device_kinds or (kind,))]
    names.extend(find_engine(one.engine, engines) for one in policy.execution.fallback_candidates)
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
    return decide(request, policy, machine, engines), machine
