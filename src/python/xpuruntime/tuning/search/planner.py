# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Planner`: plans of the base policy with some keys changed; nothing is opened."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.quantisation import uses_calibration
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.paths import json_bytes
from xpuruntime.inference.plan_request import plan_request
from xpuruntime.tuning.search.space import BATCH, apply_changes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.planning import Plan, PlanRequest
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine

__all__ = ["Planned", "Planner", "Rejected"]


class Planned(NamedTuple):
    """A plan that was accepted: who runs it, its policy, and a digest of what the engine gets."""

    engine: str
    device: str
    policy: Policy
    settings_digest: str
    computes: str | None


class Rejected(NamedTuple):
    """Why no plan takes the keys."""

    reason: str


class Planner:
    """Plans changes of a base policy; `most_threads` are those of the cores that candidates have."""

    def __init__(
        self,
        request: PlanRequest,
        base: Policy,
        registry: EngineRegistry,
        machine: Machine | None,
        *,
        most_threads: int | None,
    ) -> None:
        self._request, self._base, self._most = request, base, most_threads
        self._registry, self._machine = registry, machine

    def plan(self, changes: Mapping[str, Any]) -> Planned | Rejected:
        """Plan the base policy with these keys changed.

        A key that the engine does not enforce is rejected: a candidate that gets less than it states would be measured
        as something else than it is.
        """
        try:
            policy = apply_changes(self._base, changes)
            threads = policy.execution.threads
            if self._most is not None and threads is not None and threads > self._most:
                return Rejected(f"execution.threads: {threads} are more than the device has, which is {self._most}")
            request = self._request
            if not uses_calibration(policy, request.model):
                policy = policy._replaced({"calibration": None})
                request = msgspec.structs.replace(request, calibration=None)
            (plan, _), _ = plan_request(request, policy, self._registry, self._machine)
        except XpuRuntimeError as error:
            return Rejected(_reason(error))
        for key in changes:
            control = plan.control(key)
            if control is not None and control.enforceability == "unsupported":
                return Rejected(f"{key}: {control.reason}")
            if control is not None and key.startswith("kernels.") and control.resolved == "-":
                return Rejected(f"{key}: {control.reason}")
        digest = _settings_digest(plan, policy, changes.get(BATCH))
        return Planned(plan.engine, plan.device, policy, digest, plan.settings.get("computes"))


def _settings_digest(plan: Plan, policy: Policy, batch: int | None) -> str:
    """Return a digest of what the engine gets: the batch, and its settings or, without any, all of ``execution``."""
    settings = plan.settings or policy.execution.to_plain()
    text = json_bytes((plan.engine, plan.device, settings, plan.kernels, batch), enc_hook=str, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def _reason(error: XpuRuntimeError) -> str:
    """Return the reason of a plan's refusal: its line on the candidate, without the one that says that it is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[1:] or lines)[:500]
