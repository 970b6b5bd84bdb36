# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Planning: the choice of engine and device, a pure function of request, policy, machine and engines."""

from __future__ import annotations

from xpuruntime.planning.plan import InputFacts, ModelFacts, Plan, PlanRequest
from xpuruntime.planning.reopening import plan_here, possible_engines
from xpuruntime.planning.resolve import Resolution, decide, resolve

__all__ = [
    "InputFacts",
    "ModelFacts",
    "Plan",
    "PlanRequest",
    "Resolution",
    "decide",
    "plan_here",
    "possible_engines",
    "resolve",
]
