# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`device_fix`: another device or engine, where an engine does not have the device that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.judging import judge
from xpuruntime.evidence.verdict_codes import VerdictCode
from xpuruntime.planning.candidates import chooses_among_all_engines, devices_of, find_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.base import Engine
    from xpuruntime.planning.candidates import EngineCandidate
    from xpuruntime.planning.plan import PlanRequest
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

__all__ = ["device_fix", "kinds_of"]

_NO_DEVICE = frozenset({VerdictCode.DEVICE_MISSING, VerdictCode.DEVICE_UNSUPPORTED})


def kinds_of(engine: Engine, machine: Machine) -> tuple[str, ...]:
    """Return the kinds of device that an engine drives, such as ``("cpu", "cuda")``."""
    if engine.device_kinds is not None:
        return engine.device_kinds
    return tuple(dict.fromkeys(device.partition(":")[0] for device in devices_of(engine, machine)))


def device_fix(
    candidate: EngineCandidate, request: PlanRequest, policy: Policy, machine: Machine, engines: Mapping[str, Engine]
) -> str | None:
    """Return what to change where an engine does not have the device asked for; ``None`` where nothing would help.

    Only devices that the engine accepts here are named, and only engines that drive the kind of device; those that are
    not installed where no other is. Engines that the policy leaves to the plan have verdicts of their own.
    """

    def code(name: str, device: str) -> str:
        return judge(engines[name], request.on(device, policy), machine).verdict.code

    own = engines[candidate.engine]
    kind = candidate.device.partition(":")[0]
    here = [one for one in devices_of(own, machine) if code(candidate.engine, one) == VerdictCode.ACCEPTED]
    parts = [f"use device {' or '.join(here)}"] if here else []
    if chooses_among_all_engines(policy):
        if policy.execution.device == "auto":  # every device of every engine is tried
            return None
        return parts[0] if parts else ("use device cpu" if kind != "cpu" else None)
    asked = policy.execution.engine
    named = {find_engine(one, engines) for one in ((asked,) if isinstance(asked, str) else asked)}
    others = [
        name
        for name, engine in engines.items()
        if name not in named
        and engine.automatic
        and request.model.format in engine.formats
        and (request.purpose != "compile" or engine.compiles)
    ]
    codes = {name: code(name, candidate.device) for name in others if kind in kinds_of(engines[name], machine)}
    serving = [name for name, found in codes.items() if found == VerdictCode.ACCEPTED] or [
        name for name, found in codes.items() if found not in _NO_DEVICE
    ]
    if serving:
        parts.append(f"set execution.engine: {' or '.join(serving)}")
    if not parts and kind != "cpu":
        elsewhere = [name for name in others if "cpu" in kinds_of(engines[name], machine)]
        if elsewhere:
            parts.append(f"use device cpu with execution.engine: {' or '.join(elsewhere)}")
    return ", or ".join(parts) or None
