# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Judgement of a request: the one place that asks an engine, for planning, loading, compiling and comparing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.base import Judgement
from xpuruntime.engines.refusal import Refusal
from xpuruntime.evidence.verdict_codes import VerdictCode
from xpuruntime.runtime.packages import guarded

if TYPE_CHECKING:
    from xpuruntime.engines.base import Engine, Request
    from xpuruntime.runtime.machine import Machine

__all__ = ["Recipe", "judge"]


class Recipe(NamedTuple):
    """All that loading or compiling needs. The judgement is the engine's own, of this request."""

    engine: Engine
    request: Request
    judgement: Judgement
    machine: Machine


def judge(engine: Engine, request: Request, machine: Machine) -> Judgement:
    """Return the answer of an engine; where a plugin fails to give one, that it is broken, and why."""

    def failed(reason: str) -> Judgement:
        told = f"its plugin failed to judge the request: {reason}"
        fix = "upgrade or uninstall the package that the plugin is of"
        return Refusal(VerdictCode.ENGINE_BROKEN, told, fix).judgement(engine.name, request.device)

    def call() -> Judgement:
        found = engine.judge(request, machine)
        if not isinstance(found, Judgement):
            raise TypeError(f"judge() returned an object of type {type(found).__name__}, not Judgement")
        return found

    return guarded(engine, call, failed)
